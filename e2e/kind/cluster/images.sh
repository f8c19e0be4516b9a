# Our container images: trees that were assembled without an engine become images of the engine and of every node.
# shellcheck shell=bash

IMAGES=$REPOSITORY/target/image
IMAGE_PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

use_images() {
	use_image tranche/tranche:dev "$IMAGES/tranche"
	use_image tranche/workload:dev "$IMAGES/workload"
}

# use_image NAME TREE [NODE...] loads the image unless each of the nodes, of all by default, has one of the same content.
use_image() {
	local name=$1 tree=$2 content node
	shift 2
	[[ -d $tree ]] || die "${tree#"$REPOSITORY/"} is missing: run make image"
	content=$(tree_digest "$tree")
	# shellcheck disable=SC2046 # names of nodes have no blanks
	(($# > 0)) || set -- $(nodes)
	for node; do
		[[ $(docker exec "$node" cat "$(image_mark "$name")" 2>/dev/null) == "$content" ]] || {
			step "Loading $name" load_image "$name" "$tree" "$content" "$@"
			return
		}
	done
	kept "The image $name"
}

# tree_digest hashes what an image is made of: names, modes, links and contents, and how it is made.
tree_digest() {
	{
		(cd "$1" && find . -printf '%y %m %p %l\n' | sort)
		digest "$1" "$IMAGE_PATH"
	} | sha256sum | cut -c 1-16
}

image_mark() { echo "/kind/image-${1//[^a-z]/-}"; }

load_image() {
	local name=$1 tree=$2 content=$3 node with_containerd=()
	shift 3
	tar --create --directory "$tree" --owner 0 --group 0 --numeric-owner . |
		docker import --change "ENV PATH=$IMAGE_PATH" --change 'CMD ["/bin/sh"]' - "$name"
	for node; do
		if runs_crio "$node"; then
			docker save "$name" | copy_to_crio "$node" "docker.io/$name"
		else
			with_containerd+=("$node")
		fi
	done
	kind load docker-image --name "$CLUSTER" --nodes "$(IFS=, && echo "${with_containerd[*]}")" "$name"
	for node; do
		docker exec "$node" sh -c "echo $content >$(image_mark "$name")"
	done
}
