# One entry for everything a newcomer runs; each target sets itself up on a machine with nothing but Python.
PYTHON_BASE ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALL := $(PYTHON) -m pip install --quiet --editable

.PHONY: test test-gpu demo parity lint format install clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON_BASE) -m venv $(VENV)
	$(INSTALL) '.[train,test]'
	touch $@

install: $(VENV)/.installed

## Lint, type-check and run the test suite (no GPU, no torch).
test: install lint
	$(PYTHON) -m pytest --numprocesses 2

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: install
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

## Complete a prompt with the embedded pair.
demo: install
	$(PYTHON) -m dflash_jax.generate

## Compare the targets with transformers' models live; needs the CPU build of torch (Python 3.11).
parity: install
	$(INSTALL) '.[train,test,parity]'
	DFLASH_TEST_PARITY=1 $(PYTHON) -m pytest tests/parity

## The tests that a GPU can run, the `gpu` ones included, on a machine that already has jax for it and pytest.
test-gpu:
	DFLASH_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest --override-ini addopts='-q --strict-markers'

clean:
	rm -rf $(VENV)
