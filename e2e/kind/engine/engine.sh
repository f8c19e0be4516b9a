# The Docker engine: a running one, else one of our own from Debian's packages.
# Ours has its own folders, socket, containerd and cgroup, and no bridge but the one that kind makes.
# shellcheck shell=bash

engine_answers() { timeout 10 docker info >/dev/null 2>&1; }

our_engine_answers() { DOCKER_HOST=$ENGINE_HOST engine_answers; }

our_engine_runs() { is_our_process "$(cat "$ENGINE_RUN/dockerd.started" 2>/dev/null)" dockerd; }

# is_our_process PID NAME tells whether the process still is the one that we started.
is_our_process() {
	[[ $1 && $(cat "/proc/$1/comm" 2>/dev/null) == "$2" ]] &&
		tr '\0' ' ' <"/proc/$1/cmdline" | grep -qF "$ENGINE_RUN"
}

# need_engine installs our own engine and the tools that find its traces.
need_engine() {
	need dockerd docker.io iptables
	need docker docker-cli # a package of its own since Debian 13
	need nft nftables
	need ip iproute2
	need sysctl procps
}

# use_engine sets DOCKER_HOST to the engine that all later steps use.
use_engine() {
	if command -v docker >/dev/null && engine_answers; then
		kept "The Docker engine${DOCKER_HOST:+ at $DOCKER_HOST}"
		return
	fi
	need_engine
	if engine_answers; then
		kept "The Docker engine, which its package has started,"
		return
	fi
	export DOCKER_HOST=$ENGINE_HOST
	if our_engine_runs && wait_for 60 "the answer of our engine" our_engine_answers; then
		kept "Our Docker engine"
		return
	fi
	((EUID == 0)) || die "no Docker engine answers, and only root can start one: start Docker or run as root"
	remove_engine_traces
	on_failure=show_engine_log step "Starting a Docker engine of our own" start_engine
}

# has_sys_resource tells whether root here may have capability 24.
has_sys_resource() {
	local bounding
	bounding=$(awk '/^CapBnd/ {print $2}' /proc/self/status)
	((16#$bounding >> 24 & 1))
}

start_engine() {
	mkdir -p "$ENGINE_STATE" "$ENGINE_RUN"
	remember_machine
	keep_in_memory
	sysctl -q -w fs.inotify.max_user_instances="$(at_least 512 fs.inotify.max_user_instances)"

	local options=(
		--host "$ENGINE_HOST" --pidfile "$ENGINE_RUN/dockerd.pid"
		--data-root "$ENGINE_STATE/docker" --exec-root "$ENGINE_RUN/docker"
		--containerd "$ENGINE_RUN/containerd.sock"
		--config-file "$ENGINE_RUN/dockerd.json" --log-level warn
		--exec-opt native.cgroupdriver=cgroupfs --cgroup-parent "/$ENGINE_CGROUP"
		--bridge none
	)
	if ! has_sys_resource; then
		install -m 755 "$KIND_DIR/engine/runc-without-missing-capabilities" "$ENGINE_STATE/runc"
		options+=(--add-runtime "tranche=$ENGINE_STATE/runc" --default-runtime tranche)
	fi

	echo '{}' >"$ENGINE_RUN/dockerd.json"
	cat >"$ENGINE_RUN/containerd.toml" <<-END
		version = 2
		root = "$ENGINE_STATE/containerd"
		state = "$ENGINE_RUN/containerd"
		disabled_plugins = ["io.containerd.grpc.v1.cri"]
		[grpc]
		  address = "$ENGINE_RUN/containerd.sock"
	END
	in_background containerd containerd --config "$ENGINE_RUN/containerd.toml" --log-level warn
	wait_for 30 "containerd's socket" test -S "$ENGINE_RUN/containerd.sock"
	in_background dockerd dockerd "${options[@]}"
	wait_for 60 "the engine's answer" our_engine_answers
	# With another bridge on the machine, the engine drops packets that are forwarded between nodes.
	iptables -P FORWARD ACCEPT
}

# keep_in_memory has the engine's files, and so the nodes', in memory where there is enough of it: an fsync of a node then never waits
# for a disk that a compiler keeps busy.
keep_in_memory() {
	local folder
	[[ $DURABLE == no ]] && (($(awk '/^MemAvailable:/ {print $2}' /proc/meminfo) >= 16 << 20)) || return 0
	for folder in docker containerd; do
		mkdir -p "$ENGINE_STATE/$folder"
		mount -t tmpfs -o size=12g,mode=700 tmpfs "$ENGINE_STATE/$folder"
	done
}

at_least() {
	local now
	now=$(sysctl -n "$2")
	echo $((now > $1 ? now : $1))
}

# in_background NAME COMMAND... starts a daemon that outlives this script, with a log and a pid file.
in_background() {
	local name=$1
	shift
	setsid "$@" >"$ENGINE_STATE/$name.log" 2>&1 </dev/null &
	echo $! >"$ENGINE_RUN/$name.started"
}

show_engine_log() {
	local name
	for name in containerd dockerd; do
		echo "  $ENGINE_STATE/$name.log:"
		tail -n 15 "$ENGINE_STATE/$name.log" 2>/dev/null | sed 's/^/    /'
	done
}
