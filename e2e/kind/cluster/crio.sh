# CRI-O in place of containerd in every worker but the first, so that the suite runs on both. The official node image lacks
# the libraries that Debian's conmon needs, so there all workers keep containerd.
# shellcheck shell=bash

CRIO_SOCKET=/var/run/crio/crio.sock

use_crio() {
	local node
	[[ $CRIO == yes ]] && node_image_is_ours || return 0
	for node in $(workers | tail -n +2); do
		runs_crio "$node" && continue
		make_crio
		on_failure=show_node_logs step "Replacing containerd by CRI-O in $node" replace_containerd "$node"
	done
}

runs_crio() { docker exec "$1" systemctl is-enabled --quiet crio.service 2>/dev/null; }

# replace_containerd NODE ends all containers of the node and starts the pods again in CRI-O, with the same images.
replace_containerd() {
	local node=$1 files
	files=$(mktemp -d)
	crio_files "$files" "$(docker exec "$node" ctr --namespace k8s.io images list --quiet | grep /pause:)"
	tar --create --directory "$files" --owner 0 --group 0 etc usr | docker exec -i "$node" tar --extract --directory / --no-overwrite-dir
	rm -rf "$files"
	docker exec "$node" sh -euc '
		systemctl stop kubelet.service
		for image in $(ctr --namespace k8s.io images list --quiet | grep -E "/(kube-proxy|pause):"); do
			# --local: without it the program may end before it has written the whole archive (containerd 2.4).
			ctr --namespace k8s.io images export --local /var/lib/image.tar "$image"
			copyimg --import-from docker-archive:/var/lib/image.tar --image-name "$image"
		done
		rm /var/lib/image.tar
		systemctl disable --quiet containerd.service
		systemctl kill --signal KILL "cri-containerd-*.scope" containerd.service
		systemctl stop containerd.service
		nft delete table ip kube-proxy || true # kube-proxy 1.37 loses an element of one that it finds
		systemctl daemon-reload
		systemctl enable --now --quiet crio.service
		systemctl start kubelet.service'
	wait_for 60 "CRI-O in the status of $node" reports_crio "$node"
	kubectl wait --for condition=Ready "node/$node" --timeout 60s
}

reports_crio() {
	[[ $(kubectl get node "$1" --output jsonpath='{.status.nodeInfo.containerRuntimeVersion}') == cri-o://* ]]
}

# crio_files FOLDER PAUSE leaves CRI-O and its configuration as they are in a node, with PAUSE as the image of every pod.
crio_files() {
	local folder=$1 pause=$2
	mkdir -p "$folder"/usr/local/{bin,lib/crio} "$folder"/etc/{containers,crio,default,systemd/system}
	cp "$(crio_part)"/* "$folder/usr/local/bin/"
	sed 's|^exec runc |exec /usr/local/lib/runc/runc |' "$KIND_DIR/engine/runc-without-missing-capabilities" \
		>"$folder/usr/local/lib/crio/runc"
	chmod 755 "$folder/usr/local/lib/crio/runc"
	# What the packages of CRI-O and Podman install: images without a registry are Docker's, and none has to be signed.
	echo '{"default": [{"type": "insecureAcceptAnything"}]}' >"$folder/etc/containers/policy.json"
	echo 'unqualified-search-registries = ["docker.io"]' >"$folder/etc/containers/registries.conf"
	cat >"$folder/etc/containers/storage.conf" <<-END
		[storage]
		driver = "overlay"
		graphroot = "/var/lib/containers/storage"
		runroot = "/run/containers/storage"
	END
	cat >"$folder/etc/crio/crio.conf" <<-END
		[crio]
		# A node is killed, not shut down: that must not cost it its images.
		clean_shutdown_file = ""
		[crio.image]
		pause_image = "$pause"
		[crio.runtime]
		default_runtime = "runc"
		[crio.runtime.runtimes.runc]
		runtime_path = "/usr/local/lib/crio/runc"
		monitor_path = "/usr/bin/conmon"
		monitor_cgroup = "pod"
	END
	cat >"$folder/etc/systemd/system/crio.service" <<-END
		[Unit]
		Description=CRI-O
		After=network.target local-fs.target
		Before=kubelet.service
		[Service]
		ExecStart=/usr/local/bin/crio
		Type=notify
		Restart=always
		RestartSec=1
		LimitNOFILE=infinity
		TasksMax=infinity
		[Install]
		WantedBy=multi-user.target
	END
	echo KUBELET_EXTRA_ARGS=--runtime-cgroups=/system.slice/crio.service \
		"--container-runtime-endpoint=unix://$CRIO_SOCKET" >"$folder/etc/default/kubelet"
}

# copy_to_crio NODE IMAGE copies the image from an archive on stdin into the node's storage.
copy_to_crio() {
	docker exec -i "$1" sh -euc '
		trap "rm -f /var/lib/image.tar" EXIT
		cat >/var/lib/image.tar
		copyimg --import-from docker-archive:/var/lib/image.tar --image-name "$1"' copy "$2"
}
