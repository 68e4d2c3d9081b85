# Each target sets up what it needs: a virtual environment in .venv, made anew when
# pyproject.toml changes. Only Python ≥ 3.11 and make are expected.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUTPUT ?= demo.png

.PHONY: demo test test-full lint bench clean

demo: $(READY)
	$(BIN)/optax-lsdp demo --output $(OUTPUT)

test: $(READY)
	$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.steps
	$(BIN)/optax-lsdp demo --output benchmarks/results/demo.png --record benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "optax_lsdp needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,bench]'
	@touch $@
