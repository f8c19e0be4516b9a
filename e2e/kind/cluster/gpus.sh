# Makes every worker a machine with GPUs: the simulator is installed in it like a driver, with a service of its own.
# The parts stay in /opt/simulator, so that a test can install another driver version.
# The node is a container, so its device nodes, driver files and GPU memory are its own.
# shellcheck shell=bash

SIMULATOR=$REPOSITORY/target/simulator
INSTALLED=/etc/nvidia-sim/installed

use_gpus() {
	local wanted node
	[[ -x $SIMULATOR/install-root ]] || die "target/simulator is empty: run make simulator"
	wanted=$(digest "$SIMULATOR" "$GPU_MODEL" "$GPUS" "$(declare -f install_gpus)")
	for node in $(workers); do
		if [[ $(docker exec "$node" cat "$INSTALLED" 2>/dev/null) == "$wanted" ]]; then
			kept "$GPUS simulated $GPU_MODEL in $node"
		else
			step "Installing $GPUS simulated $GPU_MODEL in $node" install_gpus "$node" "$wanted"
		fi
	done
}

install_gpus() {
	local node=$1 wanted=$2
	docker exec "$node" sh -c 'rm -rf /opt/simulator /dev/nvidia*'
	docker cp "$SIMULATOR" "$node:/opt/simulator"
	docker exec "$node" /opt/simulator/install-root / --gpu-model "$GPU_MODEL" --gpus "$GPUS"
	docker exec "$node" sh -euc "
		ldconfig
		systemctl daemon-reload
		systemctl restart nvidia-sim-persistenced.socket nvidia-sim-persistenced.service nvidia-sim-pci.service
		nvidia-smi --list-gpus
		echo $wanted >$INSTALLED"
	kubectl label node "$node" nvidia.com/gpu.present=true --overwrite
}
