# Assembles the node image from its parts.
# shellcheck shell=bash

# assemble_node_image FOLDER leaves what `docker load` reads, as files: the root file system, its configuration, a manifest.
assemble_node_image() {
	local folder=$1 diff
	mkdir "$folder/rootfs"
	lay_out_rootfs "$folder/rootfs"
	import_images "$folder/rootfs"
	tar --create --file "$folder/rootfs.tar" --directory "$folder/rootfs" --numeric-owner .
	rm -rf "$folder/rootfs"
	diff=$(sha256sum <"$folder/rootfs.tar")
	jq --null-input --arg diff "sha256:${diff%% *}" '{
		architecture: "amd64", os: "linux",
		config: {
			Entrypoint: ["/usr/local/bin/entrypoint", "/sbin/init"],
			Env: ["container=docker", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
			StopSignal: "SIGRTMIN+3"
		},
		rootfs: {type: "layers", diff_ids: [$diff]}
	}' >"$folder/config.json"
}
