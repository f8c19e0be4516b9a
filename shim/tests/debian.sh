# shellcheck shell=bash
# unpack WORK SUITE COMPONENT PACKAGE...: unpacks Debian's packages into WORK/root, and leaves them in WORK/deb.
# Uses its own package index and cache, so that the machine's apt configuration does not change.
unpack() {
    local work=$1 suite=$2 component=$3 deb
    shift 3
    mkdir -p "$work"/{lists/partial,archives/partial,deb,root}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite $component" > "$work/sources.list"
    local apt=(apt-get -q -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work" -o Dir::Cache::Archives="$work/archives"
        -o APT::Sandbox::User=root)
    "${apt[@]}" update >&2
    (cd "$work/deb" && "${apt[@]}" download "$@" >&2)
    for deb in "$work"/deb/*.deb; do
        dpkg-deb -x "$deb" "$work/root"
    done
}
