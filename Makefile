# One line per target: what each does is in the script or crate that it calls. `make help` lists them.
# WORKERS, GPUS, GPU_MODEL and the others of e2e/kind/README.md go through the environment.
.DEFAULT_GOAL := help
# How what goes into the images is compiled: `dev` takes a fourth of the time of `release`, which is what users get.
export PROFILE ?= dev
# Cargo's folder of that profile.
export PROGRAMS = $(PROFILE:dev=debug)
export PATH := $(CURDIR)/target/cluster/bin:$(PATH)
# Times count from here.
ifndef TRANCHE_STARTED
export TRANCHE_STARTED := $(shell date +%s)
endif
export TRANCHE_STEPS_FILE := $(CURDIR)/target/steps
MAKEFLAGS += --no-print-directory
# Compilers, downloads and unpacking side by side: with two cores neither waits for the other.
PARALLEL := $(MAKE) --jobs=12
STEP := @e2e/kind/step
.PHONY: help build shim simulator gpu-kit image programs cluster-up cluster-down cluster-parts demo demo-down test nightly lint \
	checks unit api unit-parts oracle e2e e2e-core bench bench-scale tools clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' Makefile

build: ## the node plugin, the controller, the usage API, the MPS supervisor, `tranche` and `kubectl tranche`, in target/release; the container hook, in target/static/release
	cargo build --release -p tranche-kubelet-plugin -p tranche-gpu-check -p tranche-controller -p tranche-usage-api -p tranche-mps -p tranche-cli -p tranche-kubectl
	PROFILE=release PROGRAMS=release kubelet-plugin/hook/build

shim: ## libcuda.so.1 and libnvidia-ml.so.1 for capped shares, in target/shim
	$(STEP) "Compiling the shim" shim/build

# One call of cargo, so that a library that several programs need is compiled once: what the demo starts, or with the tests.
COMPILED ?= Tranche and the simulator
COMPILE ?= cargo build --quiet --profile $(PROFILE) -p tranche-kubelet-plugin -p tranche-gpu-check -p tranche-controller -p tranche-usage-api -p tranche-mps \
	-p tranche-workload -p tranche-simulator-cuda -p tranche-simulator-nvml -p tranche-simulator-persistenced -p tranche-simulator-pci
lint test unit e2e e2e-core: export PROFILE = dev
lint test unit e2e e2e-core: export COMPILED = Tranche, the simulator and the tests
lint test unit e2e e2e-core: export COMPILE = .ci/cargo build --quiet --lib --bins --tests --test e2e --test api
programs:
	$(STEP) "Compiling $(COMPILED)" $(COMPILE)

hook:
	$(STEP) "Compiling the container hook" kubelet-plugin/hook/build

simulator: programs part-driver ## a driver root without a GPU, in target/simulator
	@simulator/assemble

gpu-kit: ## all that a machine with a GPU needs to test and measure, in target/gpu-kit
	bench/gpu/kit

image: programs hook shim ## the images' content: tranche/tranche and tranche/workload, in target/image
	@deploy/image/assemble target/image/tranche
	@e2e/workload/assemble target/image/workload

# Parts of the cluster that are built where they cannot be pulled, and kept. Those that share Go packages come one after another.
part-%:
	@e2e/kind/part $*
part-tools: part-kubernetes
part-node-image: part-kubernetes part-containerd part-debian
cluster-parts: image simulator part-packages part-tools part-node-image

cluster-up: ## a kind cluster with simulated GPUs and Tranche on it; source target/cluster/env
	@$(PARALLEL) cluster-parts
	@e2e/kind/up

cluster-down: ## removes the cluster and every trace of it
	e2e/kind/down

demo: ## the tiers side by side on two GPUs, in one page
	@mkdir -p target && rm -f $(TRANCHE_STEPS_FILE)
	@TRANCHE_STEPS=30 $(MAKE) cluster-up
	@e2e/demo

demo-down: cluster-down ## removes every trace of the demo

test: export WORKERS ?= 2
test: ## what CI runs: the checks, the tests without a node, and the core of the e2e suite
	@$(PARALLEL) unit-parts cluster-parts checks
	$(MAKE) unit api
	$(MAKE) e2e-core

nightly: export TRANCHE_STORIES = 20
nightly: ## what takes longer: more states for kube-scheduler's allocator, loom, Miri, Kani, the GPU kit, NVIDIA's large libraries, Clang's sanitizers
	driver/allocator-oracle/build
	cargo test -p tranche-allocator-oracle -p tranche-scheduler-rules
	TRANCHE_STATES=500 e2e/api/run explain::it_agrees
	shim/core/deep-check
	@$(PARALLEL) shim simulator part-clients
	$(STEP) "Making the kit for machines with a GPU" bench/gpu/kit
	TRANCHE_GPU_KIT=target/gpu-kit .ci/cargo test --test all gpu_kit:: -- --include-ignored
	.ci/cargo test --test shim code::nvidias_large -- --ignored
	.ci/cargo test --test shim sanitizers:: -- --ignored
	$(MAKE) build

lint: checks ## the checks, and clippy, which the tests' build is, too
	$(COMPILE)

checks: tools ## formatting, shell scripts, the age of the last whole run, the chart, the alerts, the drivers' symbols
	cargo fmt --all --check
	e2e/kind/lint
	e2e/recently-run
	deploy/helm/check
	deploy/monitoring/check
	shim/symbols check

unit-parts: shim simulator oracle part-clients
	@shim/tests/install-tools
oracle: part-kubernetes
	@driver/allocator-oracle/build

unit: ## unit, property and contract tests, without a cluster; clippy
	@$(PARALLEL) unit-parts
	cargo clippy --profile shim -p tranche-shim-cuda -p tranche-shim-nvml --target-dir target/shim-build -- -D warnings
# Many tests wait, for a share to settle or for a process: two for each core keep it busy.
	RUST_TEST_THREADS=$$((2 * $$(nproc))) .ci/cargo test --tests
	cd driver/cdi-oracle && go vet ./... && go test ./...
	simulator/test-clients

api: ## tests that need an API server and a scheduler and no node
	e2e/api/run

e2e e2e-core: export WORKERS ?= 2
e2e: export CRIO = yes
e2e: ## the whole suite on a cluster of two GPU nodes, which goes afterwards unless it was there before
	@$(PARALLEL) cluster-parts part-crio part-peers part-clients-image part-browser
	e2e/kind/with e2e/run || { e2e/failures; exit 1; }

e2e-core: ## of the suite, a test for each promise that only a node shows
	@$(PARALLEL) cluster-parts
	e2e/kind/with e2e/run --core || { e2e/failures; exit 1; }

bench: export PROFILE = release
bench: export DURABLE = yes
bench: ## the numbers of SPECIFICATION.md
	@$(PARALLEL) cluster-parts
	e2e/kind/with bench/run

bench-scale: ## the controller at 100, 1,000 and 6,000 nodes, over a real API server; takes an hour
	cargo build --release -p tranche-controller -p tranche-kubectl
	bench/scale/run

tools: ## kind, helm, prometheus and promtool, in target/cluster/bin
	e2e/kind/tools

clean: ## removes what was built here, but not the cache of e2e/kind
	cargo clean
