# Debian packages, installed when a program from them is first needed.
# shellcheck shell=bash

# need PROGRAM PACKAGE... installs the packages unless the program is installed.
need() {
	local program=$1
	shift
	PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null && return
	((EUID == 0)) || die "$program is missing: install $* or run as root"
	command -v apt-get >/dev/null || die "$program is missing, and there is no apt-get to install $*"
	step "Installing $* from Debian" locked install_packages "$@"
}

install_packages() {
	export DEBIAN_FRONTEND=noninteractive
	apt-get update
	apt-get install --yes --no-install-recommends "$@"
}
