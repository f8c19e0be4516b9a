# A node's root file system: Debian with what kind's own base image has on it (images/base/Dockerfile of kind).
# shellcheck shell=bash

# The Debian of this machine, so that what is built here also runs there.
debian_suite() { (. /etc/os-release && [[ $ID == debian ]] && echo "$VERSION_CODENAME") || echo bookworm; }

debian_part() { part debian "$(debian_suite)" "$(declare -f build_debian)"; }

build_debian() {
	local folder=$1 packages=(
		systemd systemd-sysv dbus                                   # to run services
		conntrack iptables nftables iproute2 ethtool util-linux mount kmod socat rsync # for Kubernetes
		runc conmon libseccomp2 pigz containernetworking-plugins    # for containers
		e2fsprogs bash ca-certificates curl jq procps hostname      # for kind
	)
	debootstrap --variant=minbase --include="$(IFS=, && echo "${packages[*]}")" \
		"$(debian_suite)" "$folder/rootfs" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
	rm -rf "$folder"/rootfs/var/{cache/apt/archives,lib/apt/lists}/* "$folder"/rootfs/usr/share/{doc,man,locale}/*
	rm -rf "$folder"/rootfs/dev && mkdir "$folder/rootfs/dev"
	tar --create --file "$folder/rootfs.tar" --directory "$folder/rootfs" --numeric-owner .
	rm -rf "$folder/rootfs"
}

# lay_out_rootfs ROOTFS unpacks Debian and does on it what kind's base image and node image builds do.
lay_out_rootfs() {
	local rootfs=$1 files
	files=$(kind_source)/images/base/files
	tar --extract --file "$(debian_part)/rootfs.tar" --directory "$rootfs" --numeric-owner

	cp --recursive --no-preserve=mode,ownership "$files/." "$rootfs/"
	chmod 755 "$rootfs"/kind/bin/*.sh "$rootfs"/usr/local/bin/*
	cp --no-dereference "$(kubernetes_part)"/{kubernetes,kubeadm,kubectl,kubelet} "$rootfs/usr/bin/"
	cp "$(containerd_part)"/* "$rootfs/usr/local/bin/"
	mkdir -p "$rootfs/opt/cni/bin" "$rootfs/usr/local/sbin" "$rootfs/etc/kubernetes/manifests" "$rootfs/etc/cni/net.d"
	cp "$rootfs"/usr/lib/cni/{host-local,loopback,portmap,ptp} "$rootfs/opt/cni/bin/"
	ln -s /usr/sbin/runc "$rootfs/usr/local/sbin/runc"
	install -D "$(runc_part)/runc" "$rootfs/usr/local/lib/runc/runc"
	echo "$KUBERNETES_VERSION" >"$rootfs/kind/version"

	configure_services "$rootfs"
	configure_containerd "$rootfs"
}

configure_services() {
	local rootfs=$1
	find "$rootfs/lib/systemd/system/sysinit.target.wants/" -name systemd-tmpfiles-setup.service -delete
	rm -f "$rootfs"/lib/systemd/system/{multi-user,local-fs,basic}.target.wants/* \
		"$rootfs"/lib/systemd/system/sockets.target.wants/*{udev,initctl}* \
		"$rootfs"/etc/systemd/system/*.wants/*
	echo ReadKMsg=no >>"$rootfs/etc/systemd/journald.conf"
	systemctl --root "$rootfs" enable kubelet.service containerd.service undo-mount-hacks.service
	systemctl --root "$rootfs" mask systemd-binfmt.service
}

# configure_containerd makes the base of every container's runtime specification, and gives kind's second runtime handler the
# new runc; the rest is kind's own file.
configure_containerd() {
	local rootfs=$1
	sed -i '/runtimes\.test-handler\.options\]/a\    BinaryName = "/usr/local/lib/runc/runc"' "$rootfs/etc/containerd/config.toml"
	grep -q BinaryName "$rootfs/etc/containerd/config.toml"
	"$rootfs/usr/local/bin/ctr" oci spec |
		jq '.hooks.createContainer += [{path: "/kind/bin/mount-product-files.sh"}] | del(.process.rlimits)' \
			>"$rootfs/etc/containerd/cri-base.json"
}

# pause_image ROOTFS prints the name of the image that every pod starts from.
pause_image() { sed -n 's/^ *sandbox_image = "\(.*\)"/\1/p' "$1/etc/containerd/config.toml"; }
