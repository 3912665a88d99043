# The two commands of the README are `make run` and `make test`; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The tests start a thousand processes: what they import is compiled once, whatever the surroundings prefer.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup run test check lint types contracts unit soak native-peer clean

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

# A file's tests stay in one process: what they share is dear, a reference in float32 or a network of processes.
test: check
	@$(BIN)/python -m pytest -n 2 --dist loadfile tests/conformance tests/integration tests/screens

check: lint types contracts unit

lint: setup
	@$(BIN)/ruff check kvasir_console tests
	@$(BIN)/ruff format --check kvasir_console tests

types: setup
	@$(BIN)/mypy

contracts: setup
	@$(BIN)/lint-imports

# Half of their time is waiting, so that even two cores keep four processes busy.
unit: setup
	@$(BIN)/python -m pytest -n 4 --dist worksteal tests/unit

# What is too long for every day: random kills by the thousand, and the engine against a native build of llama.cpp.
soak: setup native-peer
	@$(BIN)/python -m pytest tests/soak
	@$(BIN)/kvasir-console bench engine --peer native

native-peer: .venv-native/.stamp

.venv-native/.stamp:
	@echo "Building llama.cpp for this machine into .venv-native (a quarter of an hour)"
	@$(PYTHON) -m venv .venv-native
	@.venv-native/bin/python -m pip install --quiet --no-binary llama-cpp-python llama-cpp-python
	@touch $@

clean:
	rm -rf $(VENV) .venv-native .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
