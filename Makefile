# make test checks all; CI calls the same. The first call makes .venv and takes a minute or two.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
STAMP := .venv/.stamp
# Read from constraints.txt, so that the version stands in one place.
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help .venv demo test lint bench clean

help:
	@echo "make .venv   environment with everything pinned in constraints.txt"
	@echo "make demo    plan a small model, run it, compare with one device"
	@echo "make test    format, lint, types, layers, tests"
	@echo "make lint    the same without the tests"
	@echo "make bench   the measurements"
	@echo "make clean   remove the environment, caches and builds"

.venv: $(STAMP)

# setuptools first, then no build isolation: once the packages are there, a change of
# pyproject.toml reinstalls without the network. Compiled as pip compiles what it copies, for
# commands where Python may not write beside its sources.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[dev]'
	$(BIN)/python -m compileall -q autoshard runtime search api
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two processes, half of the tests each (tests/conftest.py): many wait, others keep one core busy.
test: lint
	$(BIN)/python -m pytest -n 2

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
