# Prints progress: one line when a step starts, further lines while it runs, and its log when it fails.
# shellcheck shell=bash

elapsed() { printf '%d:%02d' $((SECONDS / 60)) $((SECONDS % 60)); }

say() { printf '[%6s] %s\n' "$(elapsed)" "$*"; }

die() {
	say "failed: $*" >&2
	exit 1
}

# step TITLE COMMAND... runs a command or function in a subshell with its output in a log of its own.
# When it fails, the log's last lines are shown, then what the function named in $on_failure prints.
step() {
	local title=$1 name log finished answer rc
	shift
	name=${title,,}
	log=$LOGS/${name//[^a-z0-9]/-}.log
	mkdir -p "$LOGS"
	say "$title"
	exec {finished}< <(
		set -e
		"$@" >"$log" 2>&1 </dev/null
		echo succeeded
	)
	while true; do
		rc=0
		read -r -t 20 answer <&"$finished" || rc=$?
		((rc > 128)) || break
		say "  … $(tail -n 1 "$log" | tr -dc '[:print:]' | cut -c 1-100)"
	done
	exec {finished}<&-
	[[ ${answer-} == succeeded ]] && return
	{
		say "failed: $title. The last lines of $log:"
		tail -n 25 "$log" | sed 's/^/    /'
		[[ -z ${on_failure-} ]] || "$on_failure" || true # shows what it can, beyond what does not answer
	} >&2
	exit 1
}

# wait_for SECONDS WHAT COMMAND... tries the command until it succeeds; WHAT names it when it does not in time.
wait_for() {
	local deadline=$((SECONDS + $1)) what=$2
	shift 2
	until "$@"; do
		((SECONDS < deadline)) || {
			echo "$what: not in time" >&2
			return 1
		}
		sleep 0.2
	done
}
