# What is built, the names, and the folders. Every value can be set in the environment.
# shellcheck shell=bash disable=SC2034 # the scripts that source this file use them

: "${CLUSTER:=tranche}"    # the kind cluster's name
: "${WORKERS:=1}"          # GPU nodes beside the control plane
: "${GPUS:=2}"             # simulated GPUs in each of them
: "${GPU_MODEL:=H100-80}"  # a machine the simulator describes
: "${CRIO:=no}"           # "yes": all workers but the first run CRI-O, on a node image of ours
: "${DURABLE:=no}"        # "yes": etcd and the engine write to the disk, as in production: for measurements
: "${NODE_IMAGE:=}"        # a kindest/node image to use instead of looking for one

KUBERNETES_VERSION=v1.37.1
CONTAINERD_VERSION=v2.4.2
RUNC_VERSION=v1.4.3

# Built parts, kept between runs and clones, named after a hash of their inputs.
: "${TRANCHE_CACHE:=${XDG_CACHE_HOME:-$HOME/.cache}/tranche}"

# This clone's files of the running cluster: `env`, kubeconfig, tools, logs.
: "${CLUSTER_DIR:=$REPOSITORY/target/cluster}"
LOGS=$CLUSTER_DIR/logs

# There is at most one engine of our own per machine; every clone can find and end it.
ENGINE_STATE=/var/lib/tranche-kind
ENGINE_RUN=/run/tranche-kind
ENGINE_CGROUP=tranche-kind
ENGINE_HOST=unix://$ENGINE_RUN/docker.sock

# The clusters' network and its bridge, with a name that nothing else uses.
export KIND_EXPERIMENTAL_DOCKER_NETWORK=tranche-kind
CLUSTER_BRIDGE=tranche-kind

export PATH=$CLUSTER_DIR/bin:$PATH
