# The two commands of the README are `make run` and `make test`; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: setup run test check lint types contracts unit soak clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing kvasir-console into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

run: setup
	@$(BIN)/kvasir-console local

test: check
	@$(BIN)/python -m pytest tests/conformance tests/integration tests/screens

check: lint types contracts unit

lint: setup
	@$(BIN)/ruff check kvasir_console tests
	@$(BIN)/ruff format --check kvasir_console tests

types: setup
	@$(BIN)/mypy

contracts: setup
	@$(BIN)/lint-imports

unit: setup
	@$(BIN)/python -m pytest tests/unit

soak: setup
	@$(BIN)/python -m pytest tests/soak

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
