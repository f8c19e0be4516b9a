# One line per target: what each does is in the script or crate that it calls. `make help` lists them.
# WORKERS, GPUS, GPU_MODEL and the others of e2e/kind/README.md go through the environment.
.DEFAULT_GOAL := help
# Link-time optimization of our programs. It takes as long as all the rest of their build: tests do without.
export LTO ?= thin
export PATH := $(CURDIR)/target/cluster/bin:$(PATH)
.NOTPARALLEL:
.PHONY: help build shim simulator gpu-kit image cluster-up cluster-down demo demo-down test nightly lint checks unit e2e bench bench-scale tools clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' Makefile

build: ## the node plugin, the controller, the MPS supervisor, the container hook, `tranche` and `kubectl tranche`, in target/release
	CARGO_PROFILE_RELEASE_LTO=$(LTO) cargo build --release -p tranche-kubelet-plugin -p tranche-controller -p tranche-mps -p tranche-cli -p tranche-kubectl
	kubelet-plugin/hook/build

shim: ## libcuda.so.1 and libnvidia-ml.so.1 for capped shares, in target/shim
	shim/build

simulator: ## a driver root without a GPU, in target/simulator
	simulator/build

gpu-kit: ## all that a machine with a GPU needs to test and measure, in target/gpu-kit
	bench/gpu/kit

image: build shim ## the images' content: tranche/tranche and tranche/workload, in target/image
	deploy/image/assemble target/image/tranche
	e2e/workload/assemble target/image/workload

cluster-up: image simulator ## a kind cluster with simulated GPUs and Tranche on it; source target/cluster/env
	e2e/kind/up

cluster-down: ## removes the cluster and every trace of it
	e2e/kind/down

demo: cluster-up ## the tiers side by side on two GPUs, in one page
	e2e/demo

demo-down: cluster-down ## removes every trace of the demo

test: export LTO = off
test: ## everything: what CI runs
	e2e/kind/beside $(MAKE) checks unit
	$(MAKE) e2e

nightly: export TRANCHE_STORIES = 10
nightly: ## what takes longer: more random states for kube-scheduler's allocator, and the account under loom, Miri and Kani
	driver/allocator-oracle/build
	cargo test -p tranche-allocator-oracle
	shim/core/deep-check

lint: checks ## the checks, and clippy, which the tests' build is, too
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --workspace --test e2e -- -D warnings

checks: tools ## formatting, shell scripts, the chart, the alerts, the drivers' symbols
	cargo fmt --all --check
	e2e/kind/lint
	deploy/helm/check
	deploy/monitoring/check
	shim/symbols check

unit: shim simulator gpu-kit ## unit, property and contract tests, without a cluster; clippy
	shim/tests/install-tools
	driver/allocator-oracle/build
	cargo clippy --profile shim -p tranche-shim-cuda -p tranche-shim-nvml --target-dir target/shim-build -- -D warnings
	cargo clippy -p tranche-simulator-nvml -- -D warnings
	.ci/cargo-test
	shim/core/deep-check loom
	cd driver/cdi-oracle && go vet ./... && go test ./...
	simulator/test-clients

e2e: export WORKERS ?= 2
e2e: image simulator ## the suite on a cluster of two GPU nodes, which goes afterwards unless it was there before
	rm -f target/e2e.log
	e2e/kind/with e2e/run || { e2e/failures; exit 1; }

bench: image simulator ## the numbers of SPECIFICATION.md
	e2e/kind/with bench/run

bench-scale: ## the controller at 100, 1,000 and 6,000 nodes, over a real API server; takes an hour
	cargo build --release -p tranche-controller -p tranche-kubectl
	bench/scale/run

tools: ## kind, helm, prometheus and promtool, in target/cluster/bin
	e2e/kind/tools

clean: ## removes what was built here, but not the cache of e2e/kind
	cargo clean
