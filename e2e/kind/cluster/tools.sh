# kind, helm and kubectl in matching versions, in target/cluster/bin.
# shellcheck shell=bash

use_tools() {
	mkdir -p "$CLUSTER_DIR/bin"
	use_go_tool kind "$KIND_VERSION" sigs.k8s.io/kind
	use_go_tool helm "$HELM_VERSION" helm.sh/helm/v4/cmd/helm -X "helm.sh/helm/v4/internal/version.version=$HELM_VERSION"
}

# use_go_tool NAME VERSION PACKAGE [LINKER-FLAG...] links the tool, built from its Go module if it was not yet.
use_go_tool() {
	local name=$1 version=$2 package=$3 part
	shift 3
	part=$(part "$name" "$package@$version")
	[[ -d $part ]] || need_go
	build "$part" "Building $name $version" build_go_tool "$package@$version" "$*"
	ln -sfn "$part/$name" "$CLUSTER_DIR/bin/$name"
}

build_go_tool() {
	CGO_ENABLED=0 GOBIN=$3 nice go install -v -trimpath -ldflags "-s -w $2" "$1"
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
