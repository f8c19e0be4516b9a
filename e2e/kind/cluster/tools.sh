# kind, helm and kubectl in matching versions, in target/cluster/bin.
# shellcheck shell=bash

use_tools() {
	local program
	mkdir -p "$CLUSTER_DIR/bin"
	[[ -d $(tools_part) ]] || need_go
	build "$(tools_part)" "Building kind and helm" build_tools
	for program in kind helm; do
		ln -sfn "$(tools_part)/$program" "$CLUSTER_DIR/bin/$program"
	done
}

# use_kubectl takes kubectl out of the node image: it always fits the cluster.
use_kubectl() {
	local part
	part=$(part kubectl "$(docker image inspect --format '{{.Id}}' "$NODE_IMAGE")")
	build "$part" "Taking kubectl out of the node image" copy_kubectl
	ln -sfn "$part/kubectl" "$CLUSTER_DIR/bin/kubectl"
}

copy_kubectl() {
	local container status=0
	container=$(docker create --network none "$NODE_IMAGE" /sbin/init)
	docker cp --follow-link "$container:/usr/bin/kubectl" "$1/kubectl" || status=$?
	docker rm "$container"
	return "$status"
}
