# What comes from Go modules: Kubernetes as one binary, containerd, CRI-O and runc for a node, and kind and helm.
# shellcheck shell=bash

# need_go prepares every build of Go modules. All have the same flags, so that a package that two of them need is compiled once.
need_go() {
	command -v go >/dev/null || die "go is missing: install Go 1.26 or newer (https://go.dev/dl)"
	# Debug information costs the compiler a tenth of its time, and the linker drops it. Inlining costs a sixth, and what runs
	# here waits more than it computes.
	export GOFLAGS="-trimpath -buildvcs=false '-gcflags=all=-dwarf=false -l'"
	# A compiler that collects no garbage takes a third less time, and up to 3 GB.
	export GOGC=off
	(($(awk '/^MemAvailable:/ {print $2}' /proc/meminfo) >= 8 << 20)) || GOGC=400
}

kubernetes_part() { part kubernetes "$KIND_DIR/node-image/kubernetes" "$KUBERNETES_VERSION"; }

# build_kubernetes FOLDER leaves the binary and one link per component.
build_kubernetes() {
	local folder=$1 version=${KUBERNETES_VERSION#v} flags='-s -w' package component
	local major=${version%%.*} minor=${version#*.}
	for package in k8s.io/client-go/pkg/version k8s.io/component-base/version; do
		flags+=" -X $package.gitVersion=$KUBERNETES_VERSION"
		flags+=" -X $package.gitMajor=$major -X $package.gitMinor=${minor%%.*}"
		flags+=" -X $package.gitCommit=$(module_hash) -X $package.gitTreeState=clean"
		flags+=" -X $package.buildDate=$(date --utc +%Y-%m-%dT%H:%M:%SZ)"
	done
	(cd "$KIND_DIR/node-image/kubernetes" &&
		CGO_ENABLED=0 nice go build -ldflags "$flags" -o "$folder/kubernetes" .)
	for component in etcd kube-apiserver kube-controller-manager kube-proxy kube-scheduler kubeadm kubectl kubelet; do
		ln -s kubernetes "$folder/$component"
	done
	"$folder/kubectl" version --client
}

# module_hash stands where upstream's builds have their commit: 40 hexadecimal digits that name the source.
module_hash() { sha1sum "$KIND_DIR/node-image/kubernetes/go.sum" | cut -d ' ' -f 1; }

tools_part() { part tools "$KIND_DIR"/node-image/kubernetes/go.{mod,sum}; }

# build_tools FOLDER leaves kind and helm. They are in Kubernetes' module, because helm has most of its packages, too.
build_tools() {
	local folder=$1 module=$KIND_DIR/node-image/kubernetes helm
	helm=$(cd "$module" && go list -m -f '{{.Version}}' helm.sh/helm/v4)
	(cd "$module" &&
		CGO_ENABLED=0 nice go build -ldflags "-s -w -X helm.sh/helm/v4/internal/version.version=$helm" -o "$folder/" tool)
}

containerd_part() { part containerd "$CONTAINERD_VERSION"; }

build_containerd() {
	local folder=$1 module=github.com/containerd/containerd/v2 program
	for program in containerd containerd-shim-runc-v2 ctr; do
		CGO_ENABLED=0 GOBIN=$folder nice go install \
			-tags no_aufs,no_zfs,no_btrfs,no_devmapper,urfave_cli_no_docs \
			-ldflags "-s -w -X $module/version.Version=$CONTAINERD_VERSION" \
			"$module/cmd/$program@$CONTAINERD_VERSION"
	done
}

runc_part() { part runc "$RUNC_VERSION" "$(debian_suite)"; }

# Debian's runc may be too old for user namespaces (before 1.2), and stays the one that containerd uses: since 1.1.6 runc
# gives up where it cannot freeze a container on cgroup v1, which happens when many containers start at once. CRI-O and
# containerd's handler `test-handler` use this one. libseccomp is Debian's on both machines.
build_runc() {
	local folder=$1
	CGO_ENABLED=1 GOBIN=$folder nice go install -tags seccomp -ldflags '-s -w' \
		"github.com/opencontainers/runc@$RUNC_VERSION"
	"$folder/runc" features | jq --exit-status '.linux.seccomp.enabled and .linux.mountExtensions.idmap.enabled'
}

crio_part() { part cri-o "$KIND_DIR/node-image/cri-o" "$(debian_suite)" "$(declare -f build_crio)"; }

# build_crio FOLDER leaves crio, its helper pinns, and copyimg, CRI-O's own program that copies an image into its storage.
build_crio() {
	local folder=$1 module=$KIND_DIR/node-image/cri-o source
	(cd "$module" && CGO_ENABLED=1 nice go build -ldflags '-s -w' \
		-tags containers_image_ostree_stub,containers_image_openpgp,exclude_graphdriver_btrfs,seccomp \
		-o "$folder/" tool)
	source=$(cd "$module" && go list -m -f '{{.Dir}}' github.com/cri-o/cri-o)
	cc -std=c99 -Os -static -o "$folder/pinns" "$source"/pinns/src/*.c
	"$folder/crio" version
}

# kind_source prints where kind's module lies: the files of its base image are taken from there.
kind_source() { module_source sigs.k8s.io/kind; }

# module_source MODULE prints where a module of Kubernetes' list lies.
module_source() { (cd "$KIND_DIR/node-image/kubernetes" && go mod download -json "$1" | jq -r .Dir); }
