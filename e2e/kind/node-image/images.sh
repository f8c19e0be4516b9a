# The container images that a control plane starts from, as one archive that shares the one binary's layer.
# shellcheck shell=bash

# import_images ROOTFS puts the images into the node's containerd store, so that no node pulls anything.
import_images() {
	local rootfs=$1 work
	work=$(mktemp -d)
	make_archive "$rootfs" "$work"
	load_archive "$rootfs" "$work"
	rm -rf "$work"
}

make_archive() {
	local rootfs=$1 work=$2 version=$KUBERNETES_VERSION component pause etcd
	pause=$(pause_image "$rootfs")
	etcd=$("$(kubernetes_part)/kubeadm" config images list --kubernetes-version "$version" | grep /etcd:)
	mkdir -p "$work"/archive "$work"/{binary/usr/local/bin,proxy,pause}

	cp --no-dereference "$(kubernetes_part)"/{kubernetes,etcd,kube-*} "$work/binary/usr/local/bin/"
	copy_with_libraries "$rootfs" "$work/proxy" /usr/sbin/nft
	cc -Os -static -DVERSION=0 -o "$work/pause/pause" "$(kubernetes_source)/build/pause/linux/pause.c"
	layer "$work" binary
	layer "$work" proxy
	layer "$work" pause

	{
		for component in kube-apiserver kube-controller-manager kube-scheduler; do
			image "$work" "registry.k8s.io/$component:$version" "$component" binary
		done
		image "$work" "registry.k8s.io/kube-proxy:$version" kube-proxy binary proxy
		image "$work" "$etcd" etcd binary
		image "$work" "$pause" /pause pause
	} | jq --slurp . >"$work/archive/manifest.json"
	tar --create --file "$work/archive.tar" --directory "$work/archive" .
}

kubernetes_source() { module_source k8s.io/kubernetes; }

# copy_with_libraries ROOTFS TO PROGRAM copies a program of the node with every library it loads.
copy_with_libraries() {
	local rootfs=$1 to=$2 program=$3 file
	chroot "$rootfs" ldd "$program" | grep -o '/[^ ]*' | while read -r file; do
		install -D "$rootfs$file" "$to$file"
	done
	install -D "$rootfs$program" "$to$program"
}

layer() {
	tar --create --file "$1/archive/$2.tar" --directory "$1/$2" --owner 0 --group 0 --numeric-owner --mtime @0 --sort name .
}

# image WORK NAME ENTRYPOINT LAYER... writes an image's configuration and prints its entry in the archive's manifest.
image() {
	local work=$1 name=$2 entrypoint=$3 file
	shift 3
	file=$(basename "${name%%:*}").json
	(cd "$work/archive" && sha256sum "${@/%/.tar}") | jq --raw-input --slurp --arg entrypoint "$entrypoint" '{
		architecture: "amd64", os: "linux",
		config: {Entrypoint: [$entrypoint], Env: ["PATH=/usr/local/bin:/usr/sbin:/usr/bin"]},
		rootfs: {type: "layers", diff_ids: (split("\n") | map(select(. != "") | "sha256:" + .[:64]))}
	}' >"$work/archive/$file"
	jq --null-input --arg config "$file" --arg name "$name" \
		'{Config: $config, RepoTags: [$name], Layers: [$ARGS.positional[] + ".tar"]}' --args "$@"
}

# load_archive ROOTFS WORK runs the node's containerd on the node's store for as long as the import takes.
load_archive() {
	local rootfs=$1 work=$2 containerd status=0
	cat >"$work/containerd.toml" <<-END
		version = 3
		root = "$rootfs/var/lib/containerd"
		state = "$work/state"
		disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"]
		[grpc]
		  address = "$work/containerd.sock"
		[ttrpc]
		  address = "$work/containerd.ttrpc.sock"
	END
	"$rootfs/usr/local/bin/containerd" --config "$work/containerd.toml" &
	containerd=$!
	wait_for 30 "containerd's socket" test -S "$work/containerd.sock" &&
		"$rootfs/usr/local/bin/ctr" --address "$work/containerd.sock" --namespace k8s.io \
			images import --local --no-unpack "$work/archive.tar" || status=$?
	kill "$containerd"
	wait "$containerd" || true
	return "$status"
}
