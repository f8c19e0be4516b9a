# The kind cluster, and the file with its environment: target/cluster/env.
# shellcheck shell=bash

export KUBECONFIG=$CLUSTER_DIR/kubeconfig

# use_cluster keeps a cluster that answers and has the requested size, else makes a new one.
use_cluster() {
	if cluster_is_as_asked; then
		kept "The cluster $CLUSTER"
		kind get kubeconfig --name "$CLUSTER" >"$KUBECONFIG"
	else
		delete_cluster
		write_scheduler_config
		write_kind_config
		on_failure=show_node_logs step "Creating the cluster: a control plane and $WORKERS worker(s)" create_cluster
	fi
	write_env
}

# nodes lists the cluster's nodes, running or not, by the label that kind gives them.
nodes() { node_containers "io.x-k8s.kind.cluster=$CLUSTER"; }

node_containers() { docker ps --all --filter "label=$1" --format '{{.Names}}' 2>/dev/null | sort; }

workers() { nodes | grep -v -- '-control-plane$' || true; }

cluster_exists() { [[ $(nodes) ]]; }

# no_cluster_is_left is also true where no engine answers.
no_cluster_is_left() { [[ -z $(node_containers io.x-k8s.kind.cluster) ]]; }

cluster_is_as_asked() {
	cluster_exists &&
		[[ $(workers | wc -l) == "$WORKERS" ]] &&
		[[ $(docker inspect --format '{{.Config.Image}}' "$CLUSTER-control-plane") == "$NODE_IMAGE" ]] &&
		kind get kubeconfig --name "$CLUSTER" >"$KUBECONFIG" &&
		kubectl --request-timeout 5s wait --for condition=Ready nodes --all --timeout 1s >/dev/null 2>&1
}

delete_cluster() {
	! cluster_exists || step "Deleting the cluster $CLUSTER" delete_nodes_and_network
}

# delete_nodes_and_network does what kind does, also if kind itself is missing.
delete_nodes_and_network() {
	nodes | xargs docker rm --force --volumes
	if no_cluster_is_left; then remove_network; fi
}

# need_network makes the network before kind would: its bridge has our name, by which it can be removed without Docker.
need_network() {
	docker network inspect "$KIND_EXPERIMENTAL_DOCKER_NETWORK" >/dev/null 2>&1 ||
		docker network create --opt com.docker.network.bridge.name="$CLUSTER_BRIDGE" "$KIND_EXPERIMENTAL_DOCKER_NETWORK"
}

remove_network() {
	docker network ls --quiet --filter "name=^$KIND_EXPERIMENTAL_DOCKER_NETWORK$" | xargs --no-run-if-empty docker network rm
}

# write_kind_config writes the differences from kind's defaults, which the machine or the node image needs.
write_kind_config() {
	local worker
	{
		echo 'kind: Cluster'
		echo 'apiVersion: kind.x-k8s.io/v1alpha4'
		if node_image_is_ours; then networking_without_images; fi
		if ! has_sys_resource; then oom_scores_stay; fi
		echo 'kubeadmConfigPatches:'
		if [[ ! -f /sys/fs/cgroup/cgroup.controllers ]]; then kubelet_on_cgroup_v1; fi
		kubelet_for_tests
		control_plane_for_tests
		if node_image_is_ours; then no_dns; fi
		echo 'nodes:'
		echo '- role: control-plane'
		echo "  extraMounts: [{hostPath: '$CLUSTER_DIR/scheduler', containerPath: /etc/kubernetes/scheduler, readOnly: true}]"
		for ((worker = 0; worker < WORKERS; worker++)); do echo '- role: worker'; done
	} >"$CLUSTER_DIR/kind.yaml"
}

# Our node image has neither kindnet nor iptables in its kube-proxy.
networking_without_images() {
	cat <<-END
		networking:
		  disableDefaultCNI: true
		  kubeProxyMode: nftables
	END
}

# Without CAP_SYS_RESOURCE a process's oom score cannot be lowered, so containerd must not try.
oom_scores_stay() {
	cat <<-END
		containerdConfigPatches:
		- |
		  [plugins."io.containerd.grpc.v1.cri"]
		    restrict_oom_score_adj = true
	END
}

kubelet_on_cgroup_v1() {
	cat <<-END
		- |
		  kind: KubeletConfiguration
		  failCgroupV1: false
	END
}

# Tests kill the node plugin; each kill would double the pause before its next start. What failed is tried again when the
# kubelet looks at the pod again.
kubelet_for_tests() {
	cat <<-END
		- |
		  kind: KubeletConfiguration
		  syncFrequency: 10s
		  crashLoopBackOff:
		    maxContainerRestartPeriod: 1s
	END
}

# A test deletes a namespace at its end, which costs the controller manager some 70 calls; it may make 20 a second by default.
control_plane_for_tests() {
	cat <<-END
		- |
		  kind: ClusterConfiguration
		  controllerManager:
		    extraArgs:
		    - {name: kube-api-qps, value: "200"}
		    - {name: kube-api-burst, value: "400"}
		  scheduler:
		    extraArgs:
		    - {name: config, value: /etc/kubernetes/scheduler/config.yaml}
		    extraVolumes:
		    - {name: config, hostPath: /etc/kubernetes/scheduler, mountPath: /etc/kubernetes/scheduler, readOnly: true}
	END
	[[ $DURABLE == yes ]] || cat <<-END
		  etcd:
		    local:
		      extraArgs:
		      - {name: unsafe-no-fsync, value: "true"}
	END
}

# A pod that did not fit is tried again after two seconds at most, and not after ten.
write_scheduler_config() {
	mkdir -p "$CLUSTER_DIR/scheduler"
	cat >"$CLUSTER_DIR/scheduler/config.yaml" <<-END
		apiVersion: kubescheduler.config.k8s.io/v1
		kind: KubeSchedulerConfiguration
		clientConnection: {kubeconfig: /etc/kubernetes/scheduler.conf}
		leaderElection: {leaderElect: true}
		podMaxBackoffSeconds: 2
	END
}

# The list replaces kind's own, which is preflight.
no_dns() {
	cat <<-END
		- |
		  kind: InitConfiguration
		  skipPhases: [preflight, addon/coredns]
	END
}

create_cluster() {
	need_network
	kind create cluster --name "$CLUSTER" --image "$NODE_IMAGE" --config "$CLUSTER_DIR/kind.yaml" \
		--kubeconfig "$KUBECONFIG" --retain
	if node_image_is_ours; then connect_pods; fi
	kubectl wait --for condition=Ready nodes --all --timeout 120s
}

show_node_logs() {
	local node
	for node in $(nodes); do
		echo "  $node, its units that failed, its kubelet and its container runtime:"
		docker exec "$node" sh -c 'systemctl --failed --no-legend
			journalctl --no-pager --lines 12 --output cat --unit kubelet
			journalctl --no-pager --lines 6 --output cat --unit containerd --unit crio' 2>&1 | cut -c 1-240 | sed 's/^/    /'
	done
}

# write_env writes what a shell sources to use the cluster.
write_env() {
	{
		echo "# To use the cluster: source $CLUSTER_DIR/env"
		printf 'export KUBECONFIG=%q\n' "$KUBECONFIG"
		if [[ ${DOCKER_HOST-} ]]; then printf 'export DOCKER_HOST=%q\n' "$DOCKER_HOST"; fi
		# shellcheck disable=SC2016 # the reader's PATH is meant
		printf 'case ":$PATH:" in *:%q:*) ;; *) export PATH=%q:$PATH ;; esac\n' "$CLUSTER_DIR/bin" "$CLUSTER_DIR/bin"
		printf 'export TRANCHE_CLUSTER=%q\n' "$CLUSTER"
	} >"$CLUSTER_DIR/env"
}
