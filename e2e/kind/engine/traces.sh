# Takes our engine away with everything it has put on the machine, and nothing that was there before it.
# What cannot be told apart by its name is written down before the engine starts.
# shellcheck shell=bash

SYSCTLS=(net.ipv4.ip_forward net.ipv6.conf.all.forwarding fs.inotify.max_user_instances)

# remember_machine writes down the packet filter's chains and the settings that the engine is going to change.
remember_machine() {
	local family
	for family in iptables ip6tables; do
		"$family-save" 2>/dev/null | grep -E '^(\*|:)' >"$ENGINE_STATE/$family.before" || true
	done
	sysctl "${SYSCTLS[@]}" >"$ENGINE_STATE/sysctl.before" 2>/dev/null || true
}

# remove_engine_traces works on a running engine, on what a killed one has left, and on nothing at all.
remove_engine_traces() {
	[[ -e $ENGINE_STATE || -e $ENGINE_RUN ]] || return 0
	((EUID == 0)) || die "only root can remove the engine that was started in $ENGINE_STATE"
	step "Removing our Docker engine and its traces" remove_traces
}

remove_traces() {
	local bridges
	bridges=$(our_bridges)
	stop_process "$(cat "$ENGINE_RUN/dockerd.started" 2>/dev/null)" dockerd
	kill_cgroup
	stop_process "$(cat "$ENGINE_RUN/containerd.started" 2>/dev/null)" containerd
	unmount_below "$ENGINE_STATE" "$ENGINE_RUN"
	remove_bridges "$bridges"
	remove_rules iptables "$bridges"
	remove_rules ip6tables "$bridges"
	remove_cgroup
	restore_sysctls
	rm -rf "$ENGINE_STATE" "$ENGINE_RUN"
}

# stop_process PID NAME ends the process if it still is the one that we started, and waits for its end.
stop_process() {
	local pid=$1 name=$2
	[[ $pid && $(cat "/proc/$pid/comm" 2>/dev/null) == "$name" ]] || return 0
	tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF "$ENGINE_RUN" || return 0
	kill "$pid"
	wait_for 30 "the end of $name" process_gone "$pid" || kill -KILL "$pid"
	wait_for 10 "the end of $name" process_gone "$pid"
}

process_gone() { [[ ! -d /proc/$1 ]]; }

# kill_cgroup ends the containers' processes, which live below the engine's own cgroup, and the shims that hold them.
kill_cgroup() {
	local pid
	for pid in $(cgroup_processes) $(shims); do
		kill -KILL "$pid" 2>/dev/null || true
	done
	wait_for 20 "the end of the containers" no_processes
}

no_processes() { [[ -z $(cgroup_processes) ]]; }

cgroup_folders() {
	find /sys/fs/cgroup -mindepth 1 -maxdepth 2 -type d -name "$ENGINE_CGROUP" 2>/dev/null || true
}

cgroup_processes() {
	local folder
	for folder in $(cgroup_folders); do
		find "$folder" -name cgroup.procs -exec cat {} + 2>/dev/null || true
	done | sort -u
}

# shims lists containerd's shims that were started by our containerd: its socket is among their arguments.
shims() {
	local process
	for process in /proc/[0-9]*; do
		[[ $(cat "$process/comm" 2>/dev/null) == containerd-shim* ]] || continue
		grep -qF "$ENGINE_RUN" "$process/cmdline" && echo "${process#/proc/}"
	done
	return 0
}

remove_cgroup() {
	local folder
	for folder in $(cgroup_folders); do
		find "$folder" -depth -type d -exec rmdir {} + 2>/dev/null || true
	done
}

unmount_below() {
	local folder
	for folder in "$@"; do
		findmnt --list --noheadings --output TARGET | grep -E "^$folder(/|$)" | sort -r | while read -r target; do
			umount -l "$target"
		done
	done
}

# our_bridges lists the bridges of the engine's networks, also when it does not run any more.
our_bridges() {
	if our_engine_answers; then
		DOCKER_HOST=$ENGINE_HOST docker network ls --filter driver=bridge --quiet --no-trunc |
			sed -E 's/^(.{12}).*/br-\1/' | tee "$ENGINE_STATE/bridges"
	else
		cat "$ENGINE_STATE/bridges" 2>/dev/null || true
	fi
}

remove_bridges() {
	local bridge
	for bridge in $1; do
		ip link show "$bridge" >/dev/null 2>&1 && ip link delete "$bridge"
	done
	return 0
}

# remove_rules IPTABLES BRIDGES removes the rules that name our bridges, then the chains that were not there before the
# engine with every rule that jumps to them, and gives the built-in chains back their policy.
remove_rules() {
	local iptables=$1 bridges=$2 before=$ENGINE_STATE/$1.before table line chain
	command -v "$iptables-save" >/dev/null && [[ -f $before ]] || return 0
	"$iptables-save" | while read -r line; do
		case $line in
		\**) table=${line#\*} ;;
		-A*) if names_one_of "$line" "$bridges"; then delete_rule "$iptables" "$table" "$line"; fi ;;
		esac
	done
	"$iptables-save" | while read -r line; do
		case $line in
		\**) table=${line#\*} ;;
		:DOCKER*)
			chain=${line%% *}
			chain=${chain#:}
			in_table "$table" ":$chain " "$before" || remove_chain "$iptables" "$table" "$chain"
			;;
		:FORWARD*)
			if [[ $table == filter ]]; then "$iptables" -P FORWARD "$(policy_before "$before")"; fi
			;;
		esac
	done
	remove_empty_tables "$iptables"
}

names_one_of() {
	local word
	for word in $2; do
		[[ $1 != *"$word"* ]] || return 0
	done
	return 1
}

delete_rule() {
	local arguments
	read -ra arguments <<<"${3#-A }"
	"$1" -t "$2" -D "${arguments[@]}"
}

# remove_chain IPTABLES TABLE CHAIN
remove_chain() {
	local rule
	"$1-save" -t "$2" | grep -E -- "-j $3( |$)" | while read -r rule; do
		delete_rule "$1" "$2" "$rule"
	done
	"$1" -t "$2" -F "$3"
	"$1" -t "$2" -X "$3"
}

# in_table TABLE TEXT FILE tells whether iptables-save's output in FILE has a line that begins with TEXT in that table.
in_table() {
	awk -v table="*$1" -v text="$2" '
		/^\*/ {here = $0 == table}
		here && index($0, text) == 1 {found = 1}
		END {exit !found}' "$3"
}

policy_before() {
	awk '/^\*/ {filter = $0 == "*filter"} filter && /^:FORWARD/ {policy = $2} END {print policy ? policy : "ACCEPT"}' "$1"
}

# remove_empty_tables removes the nft tables that iptables made for the engine; they hold nothing any more.
remove_empty_tables() {
	local family=ip table
	[[ $1 == iptables ]] || family=ip6
	command -v nft >/dev/null || return 0
	for table in nat filter raw; do
		grep -qxF "*$table" "$ENGINE_STATE/$1.before" && continue
		nft list table $family $table 2>/dev/null | grep -qvE '^(table|}|[[:space:]]*(chain|type|}|$)|#)' && continue
		nft delete table $family $table 2>/dev/null || true
	done
}

restore_sysctls() {
	local name value
	[[ -f $ENGINE_STATE/sysctl.before ]] || return 0
	while IFS=' =' read -r name value; do
		sysctl -q -w "$name=$value" || true
	done <"$ENGINE_STATE/sysctl.before"
}
