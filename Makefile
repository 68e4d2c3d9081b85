# Each target first sets up what it needs in a virtual environment, .venv. The environment is built again
# when pyproject.toml changes. You need only Python ≥ 3.11 and make.
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
INSTALL := -m pip install --quiet --disable-pip-version-check
OLDEST := .venv-oldest
TPU := .venv-tpu
GPU := .venv-gpu
OUTPUT ?= demo.png

.PHONY: demo test test-full fuzz mutations soak lint docs bench accelerators paper clean

demo: $(DEMO)
	$(BIN)/optax-lsdp demo --output $(OUTPUT)

# Compiled programs are kept for the next run, and forgotten when no run has written them for two weeks.
test: export JAX_COMPILATION_CACHE_DIR ?= $(abspath $(VENV)/programs)
test: $(READY)
	mkdir -p $$JAX_COMPILATION_CACHE_DIR && find $$JAX_COMPILATION_CACHE_DIR -type f -mtime +14 -delete
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# All tests, including the slow ones, with fifty times as many examples of each law (see tests/conftest.py).
# The parts run one by one. A part that passed runs again only if the code has changed. The last part runs the
# tests of `make test` on the oldest versions that pyproject.toml allows, and ignores their deprecation warnings.
FULL := accounting auditing clipping discrete fuzz planning smoothing training rest oldest
SOURCES := $(shell find optax_lsdp benchmarks tests -name '*.py')
test-full: $(FULL:%=$(VENV)/full/%.txt)
	cat $^ | tee tests/full.txt

$(VENV)/full/oldest.txt: TRIED = $(OLDEST)/bin/python -m pytest -W default
$(VENV)/full/rest.txt: TRIED = FULL=1 $(BIN)/python -m pytest -m "" tests/test_*.py optax_lsdp
$(VENV)/full/%.txt: TRIED = FULL=1 $(BIN)/python -m pytest -m "" tests/$*
$(VENV)/full/oldest.txt: $(OLDEST)/.ready
$(VENV)/full/%.txt: $(SOURCES) | $(READY)
	mkdir -p $(@D)
	$(TRIED) -n 2 --dist worksteal -q 2>&1 | tee $@.log
	echo "$*: $$(tail -n 1 $@.log)" > $@

# More than 10,000 random trees, batches and models, in one process. tests/fuzz/last.txt keeps the results.
fuzz: $(READY)
	FUZZ=1 $(BIN)/python -m pytest -q tests/fuzz 2>&1 | tee $(VENV)/fuzz.log
	grep -A 5 '^fuzz:' $(VENV)/fuzz.log > tests/fuzz/last.txt

# Run the whole audit command on each planted bug, in two processes. Bugs that tests/auditing/last.txt has are skipped.
mutations: export XLA_FLAGS = --xla_force_host_platform_device_count=8
mutations: $(READY)
	$(BIN)/python -m tests.auditing.run_mutations 0 2 & $(BIN)/python -m tests.auditing.run_mutations 1 2; wait
	sort -o tests/auditing/last.txt tests/auditing/last.txt

# Train for 100,000 steps, once without interruption and once with random kills.
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
	$(BIN)/python -m benchmarks.effective_clip_norm
	$(BIN)/python -m benchmarks.smoothing
	$(BIN)/python -m benchmarks.correlated_noise
	$(BIN)/python -m benchmarks.accounting
	$(BIN)/python -m benchmarks.choosing
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.auditing
	$(BIN)/python -m benchmarks.users --speed $(if $(DATA),--data-dir $(DATA))
	$(BIN)/python -m benchmarks.estimates
	$(BIN)/python -m benchmarks.auto_smoothing
	$(BIN)/python -m benchmarks.watching $(if $(DATA),--data-dir $(DATA))
	$(BIN)/optax-lsdp demo --output benchmarks/results/demo.png --record benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.report

# What the compilers for TPU v5e and for an A100 make of every model, without a device: priced by the compiler, not
# measured. Where the machine has such a device, the same scripts measure. ARGS="--models NAME" prices a model anew.
accelerators: $(TPU)/.ready $(GPU)/.ready $(READY)
	$(TPU)/bin/python -m benchmarks.accelerators tpu $(ARGS)
	$(GPU)/bin/python -m benchmarks.accelerators gpu $(ARGS)
	$(TPU)/bin/python -m benchmarks.chips
	$(TPU)/bin/python -m benchmarks.tpu_smoothing
	$(TPU)/bin/python -m benchmarks.correlated_prices tpu
	$(GPU)/bin/python -m benchmarks.correlated_prices gpu
	$(BIN)/python -m benchmarks.report

# Run all experiments of the paper that have no record yet. DATA=PATH replaces downloads.
PAPER := table1 degradation step_sizes best when errors theory denoising cnn cnn_effects cnn_budgets cnn_best cifar \
  records correlated tournament cnn_tournament
paper: $(READY)
	for script in $(PAPER); do $(BIN)/python -m benchmarks.paper.$$script $(if $(DATA),--data-dir $(DATA)); done
	$(BIN)/python -m benchmarks.clip_norms $(if $(DATA),--data-dir $(DATA))
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) $(OLDEST) $(TPU) $(GPU) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

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

$(TPU)/.ready: EXTRA = tpu
$(GPU)/.ready: EXTRA = cuda12
$(TPU)/.ready $(GPU)/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) 'jax[$(EXTRA)]' --editable '.[bench]'
	@touch $@

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  extras = p["optional-dependencies"]; \
	  oldest = p["dependencies"] + extras["training"] + extras["demo"]; \
	  print("\n".join(oldest).replace(">=", "=="))' > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python $(INSTALL) --constraint $(OLDEST)/constraints.txt --editable '.[test]'
	@touch $@
