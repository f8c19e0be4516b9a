# Installs Tranche as a user does, and waits until every GPU is published.
# shellcheck shell=bash

CHART=$REPOSITORY/deploy/helm/tranche

use_chart() {
	on_failure=show_cluster step "Installing the Helm chart" install_chart
	on_failure=show_cluster step "Waiting for $((WORKERS * GPUS)) published GPUs" \
		wait_for 60 "the GPUs in the ResourceSlices" gpus_are_published
}

# The image keeps its name when its content changes; an annotation with its hash makes the pods start again then.
install_chart() {
	local content
	content=$(tree_digest "$IMAGES/tranche")
	# Helm installs them, and never updates them.
	if helm status tranche --namespace tranche-system >/dev/null 2>&1; then
		kubectl apply --server-side --force-conflicts --filename "$CHART/crds"
	fi
	helm upgrade --install tranche "$CHART" --namespace tranche-system --create-namespace \
		--values "$KIND_DIR/values.yaml" \
		--set-string "nodePlugin.podAnnotations.image-content=$content" \
		--set-string "mps.podAnnotations.image-content=$content" \
		--set-string "controller.podAnnotations.image-content=$content" \
		--set-string "usageApi.podAnnotations.image-content=$content"
	replace_supervisors "$content"
	kubectl --namespace tranche-system rollout status deployment/tranche-controller --timeout 120s
	kubectl --namespace tranche-system rollout status deployment/tranche-usage-api --timeout 120s
	kubectl --namespace tranche-system rollout status daemonset/tranche-node-plugin --timeout 120s
}

# An update leaves the supervisors of MPS daemons, whose end ends the daemons: here nothing uses them. So Helm's --wait would
# never return.
replace_supervisors() {
	local selector=app.kubernetes.io/component=mps
	kubectl --namespace tranche-system get pods --selector "$selector" --output json |
		jq --raw-output --arg content "$1" '.items[] | select(.metadata.annotations["image-content"] != $content) | .metadata.name' |
		xargs --no-run-if-empty kubectl --namespace tranche-system delete pod
	wait_for 60 "the supervisors of MPS daemons" supervisors_are_ready
}

supervisors_are_ready() {
	kubectl --namespace tranche-system get daemonset tranche-mps --output json |
		jq --exit-status '.status | .desiredNumberScheduled > 0 and .numberReady == .desiredNumberScheduled'
}

# Every GPU has exactly one exclusive device.
gpus_are_published() {
	[[ $(kubectl get resourceslices --output json | jq '[
		.items[].spec | select(.driver == "gpu.tranche.dev") | .devices // [] | .[] |
		select(.attributes.isolation.string == "exclusive")
	] | length') == $((WORKERS * GPUS)) ]]
}

show_cluster() {
	local pod
	kubectl get nodes,pods --all-namespaces --output wide 2>&1 | sed 's/^/    /'
	for pod in $(kubectl --namespace tranche-system get pods --output name 2>/dev/null); do
		echo "  $pod, its events and last log lines:"
		kubectl --namespace tranche-system events --for "$pod" --no-headers 2>&1 | tail -n 4 | cut -c 1-240 | sed 's/^/    /'
		kubectl --namespace tranche-system logs "$pod" --all-containers --tail 15 2>&1 | cut -c 1-240 | sed 's/^/    /'
	done
}
