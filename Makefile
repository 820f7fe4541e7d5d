# HiCache. `make help` lists what there is; every target sets up what it needs in .venv by itself.

PYTHON ?= python3
VENV   ?= .venv
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
OPS  ?= 1000000
SEED ?= 0
# Options of tests/mutation/run.py, such as --share 1 or --region leases.
MUTANTS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := $(CURDIR)/$(VENV)/bin
# -qq: silent unless something fails. The constraints pin what the project is tested with.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Where CI is set, pytest prints compared values whole: a failure about a megabyte would bury the others.
PYTEST := env -u CI -u BUILD_NUMBER $(BIN)/python -m pytest
INPUTS := pyproject.toml constraints.txt $(VENV)/.made
# One wheel of Mooncake per kind of machine, one API.
MOONCAKE ?= $(if $(shell command -v nvidia-smi),mooncake,mooncake-cpu)

.PHONY: help demo test test-thorough test-simulation test-mutants test-gpu test-sglang check format lint types imports deploy-lint bench proto \
        proto-check clean venv dev sglang-venv

help:  ## This list
	@bold= plain=; if [ -t 1 ]; then bold=$$'\033[1m' plain=$$'\033[0m'; fi; awk -F ':.*## ' -v b="$$bold" -v p="$$plain" \
	    '/^[a-z-]+:.*## / { printf "  %s%-14s%s %s\n", b, $$1, p, $$2 }' $(MAKEFILE_LIST)

# --- what people run ---------------------------------------------------------------------------------------------

demo: $(VENV)/.demo  ## Two replicas share one L3 daemon, on real traffic; and the hit-rate cliff
	@$(BIN)/python -m hicache.bench.demo

test: $(VENV)/.test .venv-sglang-wheel/.made  ## Every test but the long and the GPU-only ones
	@$(PYTEST) -q -n $(PYTEST_WORKERS) --dist loadfile -m "not thorough" $(PYTEST_ARGS)

check: lint types imports deploy-lint proto-check test  ## All that must hold before a merge

bench: $(VENV)/.demo  ## The published workloads in virtual time, and the cores of the tree; results in out/bench
	@mkdir -p out/bench
	@$(BIN)/hicache bench multi-turn --engine virtual --workload inkling-small --tiers l1,l1+l2,l1+l2+l3 \
	    --eviction-policy lru --json out/bench/inkling-small.json --plot out/bench/inkling-small.png
	@$(BIN)/hicache bench multi-turn --engine virtual --workload deepseek-v4-flash --tiers l1,l1+l2,l1+l2+l3 \
	    --eviction-policy lru --json out/bench/deepseek-v4-flash.json --plot out/bench/deepseek-v4-flash.png
	@$(BIN)/hicache bench tree --json out/bench/tree.json
	@$(BIN)/hicache bench overlap --json out/bench/overlap.json

proto: $(VENV)/.dev  ## Generate hicache/rpc/v1 from proto/ with the oldest grpcio supported
	@$(BIN)/python proto/generate.py

# --- the parts of check, one at a time ---------------------------------------------------------------------------

lint: $(VENV)/.dev  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(VENV)/.test $(VENV)/.dev  ## Let ruff fix and format in place; write the README's tree anew
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python tests/repo/test_readme_tree.py

types: $(VENV)/.dev view  ## mypy, strict
	@cd build/view && $(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p hicache

imports: $(VENV)/.dev view  ## Import directions
	@cd build/view && $(BIN)/lint-imports --no-logo $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.import_linter_cache

deploy-lint: $(VENV)/.dev  ## Dockerfile, compose file, systemd unit, toml
	@PATH=$(BIN):$$PATH deploy/lint

proto-check: $(VENV)/.dev  ## Fail if hicache/rpc/v1 is not what proto/ generates
	@$(BIN)/python proto/generate.py --check

test-thorough: $(VENV)/.test  ## The long versions: full products, long random histories (hours)
	@HYPOTHESIS_PROFILE=thorough $(PYTEST) -q -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

test-simulation: $(VENV)/.test  ## OPS operations on simulated caches from SEED on: a million take ten minutes
	@$(BIN)/python -m hicache.testing.endurance --operations $(OPS) --seed $(SEED)

test-mutants: $(VENV)/.test  ## Change the code in one place at a time, and see that a test notices (an hour)
	@$(BIN)/python tests/mutation/run.py $(MUTANTS)

test-gpu: $(VENV)/.test  ## Only what needs a CUDA device
	@$(PYTEST) -q -m gpu -rs tests/gpu $(PYTEST_ARGS)

sglang-venv: .venv-sglang/.made  ## Only set up .venv-sglang: the real SGLang on a CPU (2.6 GB)

test-sglang: .venv-sglang/.made  ## The real SGLang on a CPU with our L3: tree and controller, then servers (minutes)
	@.venv-sglang/bin/python -m pytest -q -rs -p no:cacheprovider --timeout 900 tests/sglang $(PYTEST_ARGS)

clean:  ## Remove everything that targets made, .venv included
	rm -rf $(VENV) .venv-sglang .venv-sglang-wheel build dist out *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# --- set-up; a stamp in .venv for each stage ---------------------------------------------------------------------

venv: $(VENV)/.test  ## Only set up .venv for demo and test

dev: $(VENV)/.test $(VENV)/.dev  ## Only set up .venv for everything

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
	    f"HiCache needs Python 3.10 or newer; $(PYTHON) is {v[0]}.{v[1]}. Name another: make PYTHON=python3.11 ...")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@test -x $(VENV)/bin/python || { echo "setting up $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@touch $@

$(VENV)/.demo: $(INPUTS)
	@echo "installing hicache with torch (once; a few minutes)"
	@$(PIP_INSTALL) -e '.[torch,bench]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo deploy/install-test-services.sh
	@echo "installing what the tests need"
	@$(PIP_INSTALL) -e '.[torch,bench,testing,redis,$(MOONCAKE)]'
	@bash deploy/install-test-services.sh
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing linters"
	@$(PIP_INSTALL) -e '.[torch,bench,testing,dev]'
	@touch $@

# Only the interface of SGLang, for tests without its server; without a network those are skipped and say so.
.venv-sglang-wheel/.made: $(VENV)/.test hicache/integrations/sglang/__init__.py hicache/testing/sglang_wheel.py
	@$(BIN)/python -m hicache.testing.sglang_wheel $(@D) && touch $@ || echo "no SGLang wheel; its tests are skipped"

.venv-sglang/.made: pyproject.toml tests/sglang/requirements.txt tests/sglang/install_sglang.sh
	@test -x $(@D)/bin/python || { echo "setting up $(@D) (once; minutes)"; $(PYTHON) -m venv $(@D); }
	@PYTHON=$(CURDIR)/$(@D)/bin/python bash tests/sglang/install_sglang.sh
	@touch $@

# A tree of links laid out as installed, for tools that read files: tiers/ and storage_backends/ get their names.
.PHONY: view
view:
	@rm -rf build/view && mkdir -p build/view
	@cp -rs $(CURDIR)/hicache build/view/ && cp -rs $(CURDIR)/tiers $(CURDIR)/storage_backends build/view/hicache/
	@find build/view -name __pycache__ -prune -exec rm -rf {} +
