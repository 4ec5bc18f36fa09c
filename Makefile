# Every target that needs the environment makes it first; on a fresh machine `make demo` and `make test` are all there is to type.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-more test-full test-journey test-fast test-emulated test-models models-table test-libraries libraries-table test-trainers trainers-table test-page page-library lint docs dist-check verify-examples bench bench-step bench-search bench-scaling bench-papers bench-pipeline bench-memory test-gpu gpu-check readme clean

SYSTEM_PYTHON := $(shell command -v python3.11 || command -v python3)
READY := .venv/.ready
PYTHON := .venv/bin/python

help: ## print this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv with the pinned versions (once; a few minutes)

# torch goes first and pinned: left to the resolver it may bring several GB of CUDA.
$(READY): pyproject.toml constraints.txt
	test -x $(PYTHON) || $(SYSTEM_PYTHON) -m venv .venv
	$(PYTHON) -m pip install "$$(grep '^torch==' constraints.txt)"
	$(PYTHON) -m pip install -c constraints.txt -e '.[bench,dev,docs]'
	touch $(READY)

demo: $(READY) ## train a small GPT on 4 processes under the plan autopar chose, beside one process
	$(PYTHON) examples/train_gpt.py

# Two at a time: while the ranks of one test wait for each other another one computes. With bytecode, since hundreds of
# processes import the package.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n 2 --dist loadfile

test: $(READY) ## five minutes of tests, some of each kind; no root and no GPU is needed
	$(PYTEST)

test-more: $(READY) ## what `make test` leaves out for its length: more models, meshes and schedules; CI runs both
	$(PYTEST) -m "thorough and not emulated and not gpu and not slow"

test-full: $(READY) ## all that needs no root and no GPU: also eight processes, and files of plans that are changed at random
	$(PYTEST) -m "not emulated and not gpu and not journey"

test-journey: $(READY) ## what people do with a model, every case in every setting beside one device; an hour
	$(PYTHON) -m pytest -m "" tests/journey

test-fast: $(READY) ## the tests that run in one process
	$(PYTHON) -m pytest -m "not multirank and not emulated and not gpu and not slow and not thorough"

test-emulated: $(READY) ## tests on a slow network of this machine's own; needs root and iproute2
	$(PYTHON) -m pytest -m emulated

test-models: $(READY) ## tiny models of all kinds of transformers on 4 processes beside one device; half an hour
	$(PYTHON) -m pytest -m "" tests/models/test_tiny.py tests/models/test_written.py

models-table: $(READY) ## the same models, written to docs/models.md
	$(PYTHON) -m tests.models.table

LIBRARIES := .venv-libraries/bin/python
LIBRARIES_READY := .venv-libraries/.ready

# Without dependencies: those of some ask for other versions of torch, and those of torchvision for its CUDA.
$(LIBRARIES_READY): pyproject.toml constraints.txt requirements-libraries.txt
	test -x $(LIBRARIES) || $(SYSTEM_PYTHON) -m venv .venv-libraries
	$(LIBRARIES) -m pip install "$$(grep '^torch==' constraints.txt)"
	$(LIBRARIES) -m pip install -c constraints.txt -e '.[dev]'
	$(LIBRARIES) -m pip install --no-deps -r requirements-libraries.txt
	touch $(LIBRARIES_READY)

test-libraries: $(LIBRARIES_READY) ## models straight from other libraries on 4 processes beside one device, in .venv-libraries; half an hour
	$(LIBRARIES) -m pytest -m "" tests/models/test_libraries.py

libraries-table: $(LIBRARIES_READY) ## the same models, written to docs/libraries.md
	$(LIBRARIES) -m tests.models.table --libraries

TRAINERS := .venv-trainers/bin/python
TRAINERS_READY := .venv-trainers/.ready

$(TRAINERS_READY): pyproject.toml constraints.txt constraints-trainers.txt requirements-torchtitan.txt
	test -x $(TRAINERS) || $(SYSTEM_PYTHON) -m venv .venv-trainers
	$(TRAINERS) -m pip install "$$(grep '^torch==' constraints.txt)"
	$(TRAINERS) -m pip install -c constraints.txt -c constraints-trainers.txt -e '.[dev,trainers]'
	$(TRAINERS) -m pip install --no-deps -r requirements-torchtitan.txt
	touch $(TRAINERS_READY)

test-trainers: $(TRAINERS_READY) ## trainers of other libraries on 4 processes beside one device, in .venv-trainers; half an hour
	$(TRAINERS) -m pytest -m "" tests/trainers

trainers-table: $(TRAINERS_READY) ## the same runs, written to docs/trainers.md
	$(TRAINERS) -m tests.trainers.table

test-page: $(READY) ## the pages of `--html` in a headless browser, by what a person does; installs Debian's chromium where there is none
	command -v chromium && command -v chromedriver || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; }
	$(PYTHON) -m pytest -m "" tests/page

page-library: ## bundle the libraries of the pages anew, with the versions of page-library/package.json; needs npm
	cd page-library && npm install --no-audit --no-fund --no-package-lock && npm run build

lint: $(READY) ## ruff over everything: rules and format; pyrefly over the package: types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	.venv/bin/pyrefly check

docs: $(READY) ## build the documentation's site: build/site/index.html; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict

DIST := build/dist-check
DIST_PYTHON := $(DIST)/venv/bin/python

dist-check: $(READY) ## build the wheel and the sdist, and try both outside of this folder; in an environment of their own
	rm -rf $(DIST)
	$(PYTHON) -m venv $(DIST)/venv
	$(DIST_PYTHON) -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(DIST_PYTHON) -m pip install -q -c constraints.txt "$$(grep -o 'build==[0-9.]*' pyproject.toml)"
	$(DIST_PYTHON) -m build --outdir $(DIST)/dist .
	$(PYTHON) -m tests.dist_check $(DIST_PYTHON) $(DIST)/dist

verify-examples: $(READY) ## one training step of examples/gpt.py on 4 processes beside one device
	.venv/bin/autopar verify examples/gpt.py:build --mesh dp=2,tp=2

bench: bench-step bench-search bench-scaling bench-papers bench-pipeline bench-memory readme ## every benchmark; an hour; results go to bench/results

bench-step: $(READY) ## real training steps: autopar beside DDP, FSDP2 and parallelize_module
	$(PYTHON) -m bench.step

bench-search: $(READY) ## plan times, costs, bounds and the best plans by hand; half an hour
	$(PYTHON) -m bench.search

bench-scaling: $(READY) ## plan time against depth, devices and mesh axes, as a figure
	$(PYTHON) -m bench.scaling

bench-papers: $(READY) ## published comparisons, by calculation
	$(PYTHON) -m bench.papers

bench-pipeline: $(READY) ## pipeline steps on real processes beside their simulation
	$(PYTHON) -m bench.pipeline

bench-memory: $(READY) ## predicted peaks of memory beside counted ones
	$(PYTHON) -m bench.memory

DEVICE ?= cuda

test-gpu: $(READY) ## on a machine with a GPU: the tests that need one
	$(PYTHON) -m pytest -m gpu

gpu-check: $(READY) ## on a machine with GPUs: numerics, collectives, memory and times beside one device; DEVICE=cpu needs none
	$(PYTHON) -m bench.gpu_check --device $(DEVICE)

readme: $(READY) ## write the figures of bench/results into README.md
	$(PYTHON) -m bench.readme

clean: ## remove the environment and caches
	rm -rf .venv .venv-libraries .venv-trainers .pytest_cache .hypothesis .ruff_cache build *.egg-info
