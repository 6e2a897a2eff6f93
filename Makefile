# Everything a developer types. Each target does its own set-up; `make` lists them.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A process for each core. The tests of a file stay together, because they share fixtures.
UNIT_TESTS = $(BIN)/python -m pytest -m 'not e2e' -n auto --dist loadfile
VENDOR_TESTS = $(BIN)/python -m pytest -m vendor tests/deviceplugin
# Two processes with a cluster each, even on two cores: these tests mostly wait. Long files come first.
CLUSTER_TESTS = $(BIN)/python -m pytest -m e2e -n 2 --dist loadfile --no-loadscope-reorder

# Tests start hundreds of Python processes, which start sooner with their bytecode. All run what is installed in .venv.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help install demo demo-clean test test-unit test-vendor lint bench experiments measured crds protos docs site image krew release clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(STAMP) ## everything into .venv, including the `carpool` command

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "expected Python 3.11 or later, found $$($(PYTHON) --version 2>&1); choose one with make PYTHON=…"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { apt-get -qq update && apt-get -qq install -y python3-venv && $(PYTHON) -m venv $(VENV); } || \
	  { echo "expected Python's venv module, found none: install the package python3-venv"; exit 1; }
	@echo "Installing Carpool and its dependencies, including PyTorch, into $(VENV), once: about 3 GB to fetch, 6 GB on disk."
	@echo "That takes 2 to 4 minutes with a fast or cached index; the downloads are shown below."
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[test]'
	@touch $@

demo: install ## a real cluster, six scenes, a table and a picture (KEEP=1 leaves it running)
	$(BIN)/python -m carpool_e2e demo $(if $(KEEP),--keep)

# Clusters that a run of this user left; without any, nothing is installed to remove them.
LEFT := $(wildcard /tmp/carpool-$(shell id -u)/*)

demo-clean: $(if $(LEFT),$(if $(wildcard $(STAMP)),,install)) ## take down every cluster that a demo or a test left
	@if [ -e $(STAMP) ]; then $(BIN)/python -m carpool_e2e clean; else echo "no cluster to remove"; fi

test: install ## all tests: first those without a cluster, then those on real clusters
	$(BIN)/python -m carpool_e2e prepare --vendor
	$(UNIT_TESTS)
	$(VENDOR_TESTS)
	$(CLUSTER_TESTS)

test-unit: install ## the tests that need no cluster
	$(UNIT_TESTS)

test-vendor: install ## the tests with NVIDIA's programs, which they fetch; no GPU
	$(VENDOR_TESTS)

lint: install ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install ## measure, and write docs/benchmarks.md
	$(BIN)/python -m carpool_e2e bench

experiments: install ## run published workloads in the simulator, and write docs/experiments.md (needs CARPOOL_DATA)
	$(BIN)/python -m carpool_research experiments

measured: install ## judge the shipped models on this project's own measurements of two GPUs
	$(BIN)/python -m carpool_research measured

crds: install ## generate the CRDs from the Python types
	$(BIN)/carpool crds --out crds --out helm/carpool/definitions

protos: install ## generate the gRPC stubs of the kubelet's APIs
	sh deviceplugin/protos.sh $(CURDIR)/$(BIN)/python

docs: install ## write docs/reference/ from the code, and the dashboards of the chart
	PYTHONPATH=docs $(BIN)/python -m carpool_docs

site: install ## the documentation as pages, into out/site/index.html
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder html --doctree-dir out/doctrees docs out/site

COMMIT = "$$(git describe --always --dirty --exclude='*' --abbrev=12)"

image: install ## the three images into dist/images.tar, an OCI archive, without Docker (ARCH="amd64 arm64" for both, TRACE=1 with PyTorch)
	$(BIN)/python -m carpool_e2e images --out dist/images.tar --commit $(COMMIT) $(ARCH:%=--arch=%) $(if $(TRACE),--trace)

release: install ## wheel, chart, images, SBOMs and notes of VERSION= into dist/VERSION, checked from an empty folder (TRACE=1 with PyTorch, too)
	$(BIN)/python -m carpool_e2e release --version "$(VERSION)" --out "dist/$(VERSION)" --commit $(COMMIT) $(patsubst %,--arch=%,$(or $(ARCH),amd64 arm64)) $(if $(TRACE),--trace)

krew: install ## archive and manifest of the kubectl plugin, into dist/ (URL= of the archive)
	rm -rf dist/krew && mkdir -p dist/krew
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist/krew .
	cp krew/kubectl-carpool LICENSE dist/krew/
	tar -C dist/krew -czf dist/kubectl-carpool.tar.gz .
	sed -e 's|@VERSION@|$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)|' -e 's|@URL@|$(URL)|' \
	  -e "s|@SHA256@|$$(sha256sum dist/kubectl-carpool.tar.gz | cut -d' ' -f1)|" krew/carpool.yaml > dist/carpool.yaml

clean: ## remove what was built here
	rm -rf $(VENV) out dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
