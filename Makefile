# SPDX-License-Identifier: Apache-2.0
# `make qualify` and `make test` do all their own set-up. Everything they make lies in .venv, .cache and out.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export QUALIFY_CACHE ?= $(CURDIR)/.cache
unexport PYTHONPATH

# A name on PATH is not enough: version managers leave shims that only print an error.
PYTHON ?= $(shell for python in python3 python3.12 python3.13 python3.11; do \
  $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { command -v $$python; break; }; done)
BIN := .venv/bin

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.venv/.host: requirements/host.txt pyproject.toml
	@[[ -n "$(PYTHON)" ]] || { echo "error: no Python 3.11 to 3.13 found: install one, or name it with PYTHON=" >&2; exit 4; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/host.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --editable .
	@touch $@

.venv/.dev: .venv/.host requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

.PHONY: setup
setup: .venv/.host  ## .venv with the host side

.PHONY: qualify
qualify: setup  ## qualify this machine's engine; ARGS="..." go to `qualify run`
	$(BIN)/qualify run $(ARGS)

.PHONY: review
review: setup  ## review a receipt: make review RECEIPT=receipts/cpu-smoke/<run>
	$(BIN)/qualify review $(RECEIPT)

.PHONY: image
image:  ## build an engine image: make image ENGINE=cpu or cuda
	PYTHON=$(PYTHON) docker/build.sh $(ENGINE)

.PHONY: publish
publish: setup  ## push an image with its receipt: make publish RECEIPT=out/... REF=registry/name:tag
	$(BIN)/qualify publish $(RECEIPT) $(REF)

.PHONY: lint
lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: test
test: lint test-harness test-kernels test-engine  ## lint, the harness, the kernels, and the whole on the real engine

.PHONY: test-harness
test-harness: .venv/.dev
	$(BIN)/pytest -m "not engine and not docker"

# The kernels are tested in the engine's environment, with their own tools beside it. nvcc is one of them: the CUDA
# library is compiled and its machine code checked on machines without a GPU too.
KERNEL_TOOLS := $(QUALIFY_CACHE)/kernel-tools
ENGINE_PYTHON = $(BIN)/python -c "from qualify.environment import cache_folder, ensure_cpu_engine as engine; print(engine(cache_folder(), print).python)"

$(KERNEL_TOOLS)/.complete: .venv/.host kernels/requirements/test.txt kernels/requirements/cuda-build.txt
	rm -rf $(KERNEL_TOOLS)
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(KERNEL_TOOLS) --no-deps --require-hashes \
	  -r kernels/requirements/test.txt -r kernels/requirements/cuda-build.txt
	touch $@

.PHONY: test-kernels
test-kernels: $(KERNEL_TOOLS)/.complete
	engine=$$($(ENGINE_PYTHON) | tail -n 1); \
	export PATH="$(KERNEL_TOOLS)/bin:$$PATH" PYTHONPATH=$(KERNEL_TOOLS) VLLM_QOUT_NVCC=$(KERNEL_TOOLS)/nvidia/cu13/bin/nvcc PYTHONDONTWRITEBYTECODE=1; \
	chmod -R u+x $(KERNEL_TOOLS)/nvidia/cu13/bin $(KERNEL_TOOLS)/nvidia/cu13/nvvm/bin; \
	$$engine kernels/build_backend.py; \
	$$engine -m pytest kernels/tests tests/inside

.PHONY: test-engine
test-engine: .venv/.dev  ## `make qualify`, review and kill tests on the real engine
	$(BIN)/pytest -m "engine and not docker"

.PHONY: test-docker
test-docker: .venv/.dev  ## the image: built, confined, qualified, published to a registry on loopback (needs Docker)
	$(BIN)/pytest -m docker

.PHONY: faults
faults: .venv/.dev  ## the whole fault suite
	$(BIN)/python -m tests.faults

.PHONY: bench
bench: setup  ## kernels against the stock operator, on a GPU; PYTHON names one with torch
	cd kernels && $(PYTHON) -m bench $(ARGS)

.PHONY: lock
lock:  ## make the hash-locked requirement files anew (needs uv)
	requirements/lock.sh

.PHONY: schema
schema: setup  ## generate the receipt's JSON Schema
	$(BIN)/python -m qualify.receipt.schema

.PHONY: clean
clean:  ## remove what was made here, caches included
	rm -rf .venv .cache out
