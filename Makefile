# One entry for everything a newcomer runs; each target sets itself up on a machine with nothing but Python.
PYTHON_BASE ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALL := $(PYTHON) -m pip install --quiet --editable

.PHONY: test demo parity lint format install clean

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

clean:
	rm -rf $(VENV)
