# The pod network where kindnet's image cannot be pulled: each node gives its pods addresses from the range that
# Kubernetes assigned to it, and has a route to every other node's range. kindnet does the same.
# shellcheck shell=bash

connect_pods() {
	local ranges node
	wait_for 60 "the nodes' pod ranges" every_node_has_range
	ranges=$(kubectl get nodes --output jsonpath='{range .items[*]}{.metadata.name} {.spec.podCIDR} {.status.addresses[?(@.type=="InternalIP")].address}{"\n"}{end}')
	for node in $(nodes); do
		network_unit "$node" "$ranges" | docker exec -i "$node" sh -c 'cat >/etc/systemd/system/pod-routes.service'
		network_plugin "$(awk -v node="$node" '$1 == node {print $2}' <<<"$ranges")" |
			docker exec -i "$node" sh -c 'cat >/etc/cni/net.d/10-tranche.conflist'
		docker exec "$node" systemctl enable --now --quiet pod-routes.service
	done
}

every_node_has_range() {
	[[ $(kubectl get nodes --output jsonpath='{.items[*].spec.podCIDR}' | wc -w) == $((WORKERS + 1)) ]]
}

# network_unit NODE RANGES prints a unit that sets the routes at every start of the node.
network_unit() {
	local name range address
	cat <<-END
		[Unit]
		Description=Routes to the pods of the other nodes
		Before=kubelet.service
		[Service]
		Type=oneshot
		RemainAfterExit=yes
	END
	while read -r name range address; do
		[[ $name == "$1" ]] || echo "ExecStart=ip route replace $range via $address"
	done <<<"$2"
	if [[ $WORKERS == 0 ]]; then echo 'ExecStart=true'; fi
	cat <<-END
		[Install]
		WantedBy=multi-user.target
	END
}

network_plugin() {
	jq --null-input --arg range "$1" '{
		cniVersion: "0.4.0",
		name: "tranche",
		plugins: [
			{
				type: "ptp",
				ipam: {type: "host-local", ranges: [[{subnet: $range}]], routes: [{dst: "0.0.0.0/0"}], dataDir: "/run/cni-ipam-state"},
				mtu: 1500
			},
			{type: "portmap", capabilities: {portMappings: true}}
		]
	}'
}
