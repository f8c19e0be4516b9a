# Removes our engine with everything that it put on the machine, and nothing that was there before: what has a name of
# ours, and what is not in the records from before the engine's start.
# shellcheck shell=bash

# What dockerd and containerd change outside of their configured folders.
SYSCTLS=(net.ipv4.ip_forward net.ipv6.conf.all.forwarding fs.inotify.max_user_instances)
FOLDERS=(/etc/docker /run/docker /run/containerd /opt/containerd)

# remember_machine records the packet filter, the settings and the folders that the engine will change.
remember_machine() {
	iptables-save >"$ENGINE_STATE/iptables.before"
	ip6tables-save >"$ENGINE_STATE/ip6tables.before" || true
	sysctl "${SYSCTLS[@]}" >"$ENGINE_STATE/sysctl.before" || true
	ls -d "${FOLDERS[@]}" >"$ENGINE_STATE/folders.before" || true
}

# remove_engine_traces works for a running engine, for what a killed one left, and without an engine.
remove_engine_traces() {
	[[ -e $ENGINE_STATE || -e $ENGINE_RUN ]] || return 0
	((EUID == 0)) || die "only root can remove the engine that was started in $ENGINE_STATE"
	step "Removing our Docker engine and its traces" remove_traces
}

remove_traces() {
	remove_containers
	stop_process "$(cat "$ENGINE_RUN/dockerd.started")" dockerd
	kill_cgroup
	stop_process "$(cat "$ENGINE_RUN/containerd.started")" containerd
	unmount_below "$ENGINE_STATE"
	unmount_below "$ENGINE_RUN"
	if [[ -f $ENGINE_STATE/folders.before ]]; then
		remove_rules iptables ip
		remove_rules ip6tables ip6
		remove_bridge
		restore_sysctls
		remove_new_folders
	fi
	remove_cgroup
	rm -rf "$ENGINE_STATE" "$ENGINE_RUN"
}

# remove_containers lets the engine, if it runs, take its containers, bridges and rules away itself.
remove_containers() {
	our_engine_answers || return 0
	export DOCKER_HOST=$ENGINE_HOST
	docker ps --all --quiet | xargs --no-run-if-empty docker rm --force --volumes
	docker network ls --filter type=custom --quiet | xargs --no-run-if-empty docker network rm
}

# stop_process PID NAME ends the process if it still is the one that we started, and waits for its end.
stop_process() {
	local pid=$1 name=$2
	is_our_process "$pid" "$name" || return 0
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
		find "$folder" -depth -type d -exec rmdir {} +
	done
}

unmount_below() {
	local target
	findmnt --list --noheadings --output TARGET | sort --reverse | while read -r target; do
		if [[ $target == "$1"/* ]]; then umount --lazy "$target"; fi
	done
}

remove_bridge() {
	if ip link show "$CLUSTER_BRIDGE"; then ip link delete "$CLUSTER_BRIDGE"; fi
}

# remove_rules IPTABLES FAMILY loads the rules again without those that name our bridge or its addresses and, where no
# other engine had them before, without the engine's chains. Tables that hold nothing and were not there go as well.
remove_rules() {
	local iptables=$1 family=$2 before=$ENGINE_STATE/$1.before table
	[[ -f $before ]] || return 0
	"$iptables-save" --counters | sed -E "/$(our_rules "$before")/d" | "$iptables-restore" --counters
	"$iptables" -P FORWARD "$(awk '/^:FORWARD/ {policy = $2} END {print policy ? policy : "ACCEPT"}' "$before")"
	for table in nat filter; do
		if ! grep -q "^\*$table" "$before" && ! "$iptables-save" -t "$table" | grep -q '^-A'; then
			nft delete table "$family" "$table" || true # there is none where iptables is the legacy one
		fi
	done
}

# our_rules BEFORE prints a pattern for our rules in the output of iptables-save.
our_rules() {
	grep -q '^:DOCKER' "$1" || printf 'DOCKER|' # there, the chains are another engine's
	printf %s "$CLUSTER_BRIDGE"
	bridge_addresses | sed -nE 's/.* inet ([0-9]+)\.([0-9]+)\..*/| -[sd] \1\\.\2\\./p' | tr -d '\n'
}

bridge_addresses() { ip -oneline -4 address show dev "$CLUSTER_BRIDGE" 2>/dev/null || true; }

remove_new_folders() {
	local folder
	for folder in "${FOLDERS[@]}"; do
		grep -qx "$folder" "$ENGINE_STATE/folders.before" || rm -rf "$folder"
	done
}

restore_sysctls() {
	local name value
	while IFS=' =' read -r name value; do
		sysctl -q -w "$name=$value" || true
	done <"$ENGINE_STATE/sysctl.before"
}

# engine_processes lists whoever names the engine's folder; the bracket keeps grep from finding itself.
engine_processes() { grep -la "${ENGINE_RUN/tranche/[t]ranche}" /proc/[0-9]*/cmdline 2>/dev/null || true; }

# machine_state prints the parts of the machine's state that an engine changes; it must be the same before and
# after.
machine_state() {
	ip -oneline link show type bridge | awk '{print "bridge", $2}'
	ip -oneline link show type veth | awk '{print "veth", $2}'
	ip route | sed -E 's/^/route /; s/ (linkdown|dead)//g' # whether a link is up may change at any time
	findmnt --list --noheadings --output TARGET | sed 's/^/mount /'
	iptables-save 2>/dev/null | grep -E '^(\*|:|-)' | sed 's/ \[.*//; s/^/iptables /'
	ip6tables-save 2>/dev/null | grep -E '^(\*|:|-)' | sed 's/ \[.*//; s/^/ip6tables /'
	cgroup_folders | sed 's/^/cgroup /'
	sysctl "${SYSCTLS[@]}" 2>/dev/null | sed 's/^/setting /'
	find "${FOLDERS[@]}" "$ENGINE_STATE" "$ENGINE_RUN" -maxdepth 0 2>/dev/null | sed 's/^/folder /'
	engine_processes | sed 's/^/process /'
}
