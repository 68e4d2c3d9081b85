# Each target sets up what it needs: a virtual environment in .venv, made anew when pyproject.toml
# changes, at first with what the demo needs alone. Only Python ≥ 3.11 and make are expected.
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
INSTALL := -m pip install --quiet --disable-pip-version-check
OLDEST := .venv-oldest
OUTPUT ?= demo.png

.PHONY: demo test test-full fuzz mutations soak lint docs bench paper clean

demo: $(DEMO)
	$(BIN)/optax-lsdp demo --output $(OUTPUT)

test: $(READY)
	$(BIN)/python -m pytest -n 2 $(ARGS)

# What takes long too, and fifty times the examples of every law (see tests/conftest.py), in parts: what
# has passed since the code last changed is not run again. Last come all other tests on the oldest versions
# that pyproject.toml admits, whose own deprecation warnings are not ours.
FULL := accounting auditing clipping discrete fuzz planning sampling smoothing training rest oldest
SOURCES := $(shell find optax_lsdp benchmarks tests -name '*.py')
test-full: $(FULL:%=$(VENV)/full/%.txt)
	cat $^ | tee tests/full.txt

$(VENV)/full/oldest.txt: TRIED = $(OLDEST)/bin/python -m pytest -W default
$(VENV)/full/rest.txt: TRIED = FULL=1 $(BIN)/python -m pytest -m "" tests/test_*.py optax_lsdp
$(VENV)/full/%.txt: TRIED = FULL=1 $(BIN)/python -m pytest -m "" tests/$*
$(VENV)/full/oldest.txt: $(OLDEST)/.ready
$(VENV)/full/%.txt: $(SOURCES) | $(READY)
	mkdir -p $(@D)
	$(TRIED) -n 2 -q 2>&1 | tee $@.log
	echo "$*: $$(tail -n 1 $@.log)" > $@

# More than 10,000 random trees, batches and models, in one process, which prints what it saw; kept in tests/fuzz/last.txt.
fuzz: $(READY)
	FUZZ=1 $(BIN)/python -m pytest -q tests/fuzz 2>&1 | tee $(VENV)/fuzz.log
	grep -A 5 '^fuzz:' $(VENV)/fuzz.log > tests/fuzz/last.txt

# The whole audit command on each bug that is planted in the library, in two processes. What is in tests/auditing/last.txt is not tried again.
mutations: export XLA_FLAGS = --xla_force_host_platform_device_count=8
mutations: $(READY)
	$(BIN)/python -m tests.auditing.run_mutations 0 2 & $(BIN)/python -m tests.auditing.run_mutations 1 2; wait
	sort -o tests/auditing/last.txt tests/auditing/last.txt

# 100,000 steps, left alone and under random kills.
soak: $(READY)
	$(BIN)/python -m benchmarks.soak
	$(BIN)/python -m benchmarks.report

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The manual, in docs/_build/html. A warning, such as a broken link or an unknown name, is an error. The tests of
# docs check the links from README.md as well.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build --builder html --nitpicky --fail-on-warning --keep-going --quiet \
	  --conf-dir docs --doctree-dir docs/_build/doctrees . docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(READY)
	$(BIN)/python -m benchmarks.clipping
	$(BIN)/python -m benchmarks.smoothing
	$(BIN)/python -m benchmarks.accounting
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.auditing
	$(BIN)/optax-lsdp demo --output benchmarks/results/demo.png --record benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.report

# All experiments of the paper that are not in their records yet. DATA=PATH instead of downloads.
PAPER := table1 degradation step_sizes best when errors theory denoising cnn cnn_effects cnn_budgets cnn_best cifar
paper: $(READY)
	for script in $(PAPER); do $(BIN)/python -m benchmarks.paper.$$script $(if $(DATA),--data-dir $(DATA)); done
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) $(OLDEST) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(DEMO): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "optax_lsdp needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --editable '.[demo]'
	@touch $@

$(READY): $(DEMO)
	$(BIN)/python $(INSTALL) --editable '.[test,bench]'
	@touch $@

$(VENV)/.docs: $(DEMO)
	$(BIN)/python $(INSTALL) --editable '.[docs]'
	@touch $@

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  extras = p["optional-dependencies"]; \
	  oldest = p["dependencies"] + extras["training"] + extras["demo"]; \
	  print("\n".join(oldest).replace(">=", "=="))' > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(INSTALL) --constraint $(OLDEST)/constraints.txt --editable '.[test]'
	@touch $@
