# `make demo` and `make test` need nothing but Python 3.11+ and pip; `make gpu` needs a GPU machine with torch and Triton.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test lint docs fuzz soak mutate dist bounds gpu clean

PYTHON ?= python3
JOBS ?= auto
# e.g. make demo DEMO='--model deepseek-v3 --rounding once'
DEMO ?=
# make fuzz DEVICE=cuda, make soak DEVICE=cuda MINUTES=10: with the machine's own Python, as `make gpu`
DEVICE ?= cpu
MINUTES ?= 20
FUZZ_cpu = --cases 1000000 --seed 2026 --configurations 40 --json benchmarks/cpu/fuzz.json
FUZZ_cuda = --device cuda --cases 1000000 --seed 2027 --configurations 12 --jobs $$(nproc) --json benchmarks/h200/fuzz.json
# e.g. make fuzz FUZZ='--cases 10000 --op rms_norm', or what a failure prints behind "again:"
FUZZ ?= $(FUZZ_$(DEVICE))
ANYWHERE = $(if $(filter cuda,$(DEVICE)),PYTHONPATH=src $(PYTHON),$(BIN)/python)
# mutants that `make mutate` draws, and from which seed; e.g. make mutate SAMPLE=40 SEED=7
SAMPLE ?= 300
SEED ?= 1
BIN := .venv/bin
READY := .venv/.ready

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## see it work: a model generates without and with onepass; checks, speed, batch invariance
	@$(BIN)/onepass demo $(DEMO)

test: lint ## lint, then every test that needs no GPU
	@$(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal

lint: $(READY) ## ruff (rules and format) and mypy --strict
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

docs: $(READY) ## write docs/ops.md from the contracts and docs/dist.md from docstrings
	@$(BIN)/onepass docs

fuzz: $(if $(filter cuda,$(DEVICE)),,$(READY)) ## a million random calls of all ops on DEVICE= against the oracle (CPU: an hour of one core; FUZZ= for less)
	@$(ANYWHERE) -m tools.fuzz $(FUZZ)

soak: $(if $(filter cuda,$(DEVICE)),,$(READY)) ## decode for MINUTES= on DEVICE= while requests come and go: nothing may drift, leak or slow down
	@$(ANYWHERE) -m tools.soak --device $(DEVICE) --minutes $(MINUTES) \
	  --json benchmarks/$(if $(filter cuda,$(DEVICE)),h200,cpu)/soak.json

mutate: $(READY) ## small mistakes put into a copy of the library, one at a time: does a test fail? (SAMPLE=, SEED=; an hour)
	@$(BIN)/python tests/mutation --sample $(SAMPLE) --seed $(SEED)

dist: export PYTHON := $(PYTHON)
dist: ## build sdist and wheel, look into them, install the wheel into a clean environment and run it there
	@.ci/dist

bounds: export PYTHON := $(PYTHON)
bounds: ## run some tests with the lowest and the newest versions of what onepass needs, on Python 3.11 to 3.13; downloads gigabytes
	@.ci/bounds

# Runs from src/ with the machine's own Python: nothing is installed. It leaves benchmarks/h200/ changed: commit it.
# make gpu EXTEND=--extend: run only the cases that the evidence lacks.
EXTEND ?=
EVIDENCE := benchmarks/h200/evidence.json
CHECKS = $(PYTHON) -m tools.checks --device cuda
# Sanitizers are slow, so they get the cases of a few shapes; torch must not pool memory under them.
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1
SANITIZED ?= lanes: 3x4096|short:|5x2048|5x7168|5x16384|4x1536|3x3072|6x384|5x20000|5x48x640|6x80x300|200+512|ragged:|slots:|tables|scales:|two launches:

gpu: export PYTHONPATH := src
gpu: ## check every kernel on a GPU, record the evidence, run the sanitizers, measure
	$(CHECKS) --jobs $$(nproc) --evidence $(EVIDENCE) $(EXTEND)
	$(CHECKS) --promises --jobs $$(nproc) --json benchmarks/h200/promises.json
	for tool in memcheck racecheck initcheck synccheck; do $(SANITIZE) --tool $$tool $(CHECKS) --match "$(SANITIZED)"; done
	$(PYTHON) -m onepass.bench --device cuda --json benchmarks/h200/bench.json
	$(PYTHON) -m tools.bench.report benchmarks/h200/bench.json --readme README.md
	$(PYTHON) -m tools.bench.models --device cuda --generate --json benchmarks/h200/models.json
	$(PYTHON) -m tools.bench.agreement --device cuda --json benchmarks/h200/agreement.json
	$(PYTHON) -m tools.bench.model_tables

clean: ## remove the virtual environment, caches and build output
	@rm -rf .venv .venv-* build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@echo "making .venv (once; needs pip's index)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
