# Debian packages, installed when a program from them is first needed.
# shellcheck shell=bash

# need PROGRAM PACKAGE... installs the packages unless the program is installed.
need() {
	local program=$1
	shift
	PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null && return
	((EUID == 0)) || die "$program is missing: install $* or run as root"
	command -v apt-get >/dev/null || die "$program is missing, and there is no apt-get to install $*"
	install_packages "$@"
}

install_packages() {
	step "Installing $* from Debian" alone_with_apt apt_install "$@"
}

apt_install() {
	export DEBIAN_FRONTEND=noninteractive
	apt-get update
	apt-get install --yes --no-install-recommends "$@"
}

# alone_with_apt COMMAND... runs a command or function while no other script of ours uses apt, which does not wait for its own
# locks.
alone_with_apt() {
	mkdir -p "$TRANCHE_CACHE"
	under_lock "$TRANCHE_CACHE/apt.lock" "$@"
}
