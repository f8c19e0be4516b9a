# Makes every worker a machine with GPUs: the simulator is installed in it like a driver, with a service of its own.
# The node is a container, so its device nodes, driver files and GPU memory are its own.
#
# The node's root is an overlay, whose files cannot be mounted with mapped IDs; on a machine it is the file system of a disk.
# In all workers but the first the driver's files are on /var, which is one, and runc is new: there pods with
# `hostUsers: false` start.
# shellcheck shell=bash

SIMULATOR=$REPOSITORY/target/simulator
INSTALLED=/etc/nvidia-sim/installed

use_gpus() {
	local wanted node
	[[ -x $SIMULATOR/install-root ]] || die "target/simulator is empty: run make simulator"
	wanted=$(digest "$SIMULATOR" "$GPU_MODEL" "$GPUS" "$(declare -f install_gpus files_on_disk use_new_runc)")
	for node in $(workers); do
		[[ $(docker exec "$node" cat "$INSTALLED" 2>/dev/null) == "$wanted" ]] ||
			step "Installing $GPUS simulated $GPU_MODEL in $node" install_gpus "$node" "$wanted"
	done
}

install_gpus() {
	local node=$1 wanted=$2
	docker exec "$node" sh -c 'findmnt --fstab --raw --noheadings --output TARGET | xargs --no-run-if-empty umount --lazy
		: >/etc/fstab
		rm -rf /opt/simulator /dev/nvidia*
		touch /run/before-simulator'
	docker cp "$SIMULATOR" "$node:/opt/simulator"
	docker exec "$node" /opt/simulator/install-root / --gpu-model "$GPU_MODEL" --gpus "$GPUS"
	if [[ $node != "$(workers | head -n 1)" ]]; then
		files_on_disk "$node"
		use_new_runc "$node"
	fi
	docker exec "$node" sh -euc "
		rm -rf /opt/simulator
		ldconfig
		systemctl daemon-reload
		systemctl restart nvidia-sim-persistenced.socket nvidia-sim-persistenced.service
		nvidia-smi --list-gpus
		echo $wanted >$INSTALLED"
	kubectl label node "$node" nvidia.com/gpu.present=true --overwrite
}

# files_on_disk NODE moves what install-root has just installed to /var, and mounts each file where it was, at every start.
files_on_disk() {
	docker exec "$1" sh -euc '
		find /usr /etc -xdev -type f -cnewer /run/before-simulator ! -path "/etc/systemd/*" ! -path /etc/fstab | while read -r file; do
			install -D --mode "$(stat -c %a "$file")" "$file" "/var/lib/nvidia-files$file"
			: >"$file"
			echo "/var/lib/nvidia-files$file $file none bind 0 0" >>/etc/fstab
		done
		mount --all
		findmnt --types ext4,xfs,btrfs --target /usr/bin/nvidia-smi'
}

# use_new_runc NODE makes containerd use the runc of our node image; other images have a new one.
use_new_runc() {
	docker exec "$1" sh -euc '
		if [ -e /usr/local/lib/runc/runc ]; then
			ln -sfn /usr/local/lib/runc/runc /usr/local/sbin/runc
			systemctl restart containerd
		fi'
}
