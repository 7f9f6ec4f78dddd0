# `make demo` and `make test` do everything on a fresh machine that has Python, pip and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint types suite soak bench format clean

demo: $(STAMP)           ## train the digits on 1, 2 and 4 processes and compare
	$(BIN)/evenly demo

test: lint types suite   ## lint, strict types, the whole test suite

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

suite: $(STAMP)
	$(BIN)/pytest

soak: $(STAMP)           ## long repetitions of the fault tests
	$(BIN)/pytest -m soak --timeout 3600

bench: $(STAMP)          ## every number the docs state
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Rebuilt when the pins or the declared dependencies change; a second `make` skips it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev,report,watch,tensorboard]"
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
