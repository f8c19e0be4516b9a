# Debian's prometheus and promtool, in target/cluster/bin. The package is unpacked and not installed, because it would start a
# server on this machine.
# shellcheck shell=bash

use_prometheus() {
	local part program
	mkdir -p "$CLUSTER_DIR/bin"
	part=$(part prometheus "$(debian_suite)" "$(declare -f unpack_prometheus)")
	build "$part" "Unpacking prometheus from Debian" unpack_prometheus
	for program in prometheus promtool; do
		ln -sfn "$part/usr/bin/$program" "$CLUSTER_DIR/bin/$program"
	done
}

unpack_prometheus() {
	local folder=$1
	((EUID != 0)) || alone_with_apt apt-get update
	(cd "$folder" && apt-get download prometheus)
	dpkg-deb --extract "$folder"/prometheus_*.deb "$folder"
	rm "$folder"/prometheus_*.deb
}
