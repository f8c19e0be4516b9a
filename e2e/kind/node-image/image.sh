# The node image: the official one if it can be pulled, else one that is built here.
# shellcheck shell=bash

OFFICIAL_NODE_IMAGE=kindest/node:$KUBERNETES_VERSION

# use_node_image leaves the image's name in NODE_IMAGE, and the image in the engine.
use_node_image() {
	if [[ -z $NODE_IMAGE ]] && { have_image "$OFFICIAL_NODE_IMAGE" || can_be_pulled "$OFFICIAL_NODE_IMAGE"; }; then
		NODE_IMAGE=$OFFICIAL_NODE_IMAGE
	fi
	if [[ -z $NODE_IMAGE ]]; then
		build_node_image
	elif ! have_image "$NODE_IMAGE"; then
		step "Pulling $NODE_IMAGE" timeout 900 docker pull --quiet "$NODE_IMAGE"
	fi
}

have_image() { docker image inspect "$1" >/dev/null 2>&1; }

# can_be_pulled asks the registry; no answer in time counts as no.
can_be_pulled() { timeout 20 docker manifest inspect "$1" >/dev/null 2>&1; }

# node_image_is_ours tells whether the node image was built here: it has no network plug-in and no DNS of its own.
node_image_is_ours() { [[ $NODE_IMAGE == tranche/node:* ]]; }

# builds_node_image tells, without an engine, whether a node image is built here: where Docker's registry answers, nothing is.
builds_node_image() {
	[[ -z $NODE_IMAGE ]] && ! timeout 10 bash -c '</dev/tcp/registry-1.docker.io/443' 2>/dev/null
}

build_node_image() {
	local image
	make_kubernetes
	make_containerd
	make_debian
	make_node_image
	image=$(node_image_part)
	NODE_IMAGE=tranche/node:${image##*-}
	have_image "$NODE_IMAGE" || step "Loading the node image" load_node_image "$image"
}

node_image_part() {
	part node-image "$KIND_DIR"/node-image/{rootfs,images,assemble}.sh \
		"$(basename "$(kubernetes_part)")" "$(basename "$(containerd_part)")" \
		"$(basename "$(runc_part)")" "$(basename "$(debian_part)")"
}

make_node_image() {
	((EUID == 0)) || die "only root can build a node image: run as root, or set NODE_IMAGE to one the engine has"
	need jq jq
	need cc gcc libc6-dev
	build "$(node_image_part)" "Assembling the node image" assemble_node_image
}

make_kubernetes() {
	need_go
	need jq jq
	build "$(kubernetes_part)" "Building Kubernetes $KUBERNETES_VERSION" build_kubernetes
}

make_containerd() {
	need_go
	need jq jq
	build "$(containerd_part)" "Building containerd $CONTAINERD_VERSION" build_containerd
	need_libseccomp
	build "$(runc_part)" "Building runc $RUNC_VERSION" build_runc
}

make_crio() {
	need_go
	need_libseccomp
	build "$(crio_part)" "Building CRI-O" build_crio
}

need_libseccomp() {
	need cc gcc libc6-dev
	need pkg-config pkg-config
	pkg-config --exists libseccomp || install_packages libseccomp-dev
}

make_debian() {
	need debootstrap debootstrap
	build "$(debian_part)" "Unpacking Debian $(debian_suite)" build_debian
}

load_node_image() {
	local folder=$1 work
	work=$(mktemp -d)
	jq --null-input --arg name "$NODE_IMAGE" \
		'[{Config: "config.json", RepoTags: [$name], Layers: ["rootfs.tar"]}]' >"$work/manifest.json"
	tar --create --directory "$work" manifest.json --directory "$folder" config.json rootfs.tar | docker load
	rm -rf "$work"
}
