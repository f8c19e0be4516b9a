# Prints progress: a line when a step starts, one each minute, and one with its time when it has ended; its log when it fails.
# shellcheck shell=bash

# Since when the times count: make's start, where make started this.
: "${TRANCHE_STARTED:=$(date +%s)}"
export TRANCHE_STARTED

minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

say() { printf '[%6s] %s\n' "$(minutes $(($(date +%s) - TRANCHE_STARTED)))" "$*"; }

die() {
	say "failed: $*" >&2
	exit 1
}

# place prints which step of how many begins: `make demo` sets TRANCHE_STEPS, and counts in a file, because steps run side by side.
place() {
	[[ ${TRANCHE_STEPS-} ]] || return 0
	under_lock "$TRANCHE_STEPS_FILE.lock" count_step
}

count_step() {
	echo >>"$TRANCHE_STEPS_FILE"
	printf '%2d of %d  ' "$(wc -l <"$TRANCHE_STEPS_FILE")" "$TRANCHE_STEPS"
}

# kept TITLE tells of a step that has nothing to do.
kept() { say "$(place)$1: there already"; }

# step TITLE COMMAND... runs a command or function in a subshell with its output in a log of its own.
# When it fails, the log's last lines are shown, then what the function named in $on_failure prints.
step() {
	local title=$1 name place log running pid rc begun
	shift
	name=${title,,}
	log=$LOGS/${name//[^a-z0-9]/-}.log
	mkdir -p "$LOGS"
	place=$(place)
	begun=$(date +%s)
	say "$place$title"
	exec {running}< <(
		set -e
		"$@" >"$log" 2>&1 </dev/null
	)
	pid=$!
	# Its end closes the pipe. How it ended is not read from there: a line that comes when the time is over is lost.
	while rc=0 && { read -r -t 60 <&"$running" || rc=$?; } && ((rc > 128)); do
		say "  … $place$title"
	done
	exec {running}<&-
	if wait "$pid"; then
		say "$place$title: done in $(minutes $(($(date +%s) - begun)))"
		return
	fi
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
