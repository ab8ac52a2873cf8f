# One entry for everything a newcomer runs; each target sets itself up on a machine with nothing but Python.
PYTHON_BASE ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
# Python keeps the bytecode of what it imports; pip would make that of all packages, 19 seconds of a minute.
INSTALL := $(PYTHON) -m pip install --quiet --no-compile --editable
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test test-agents test-gpu test-ray demo readme parity lint format install browser constraints clean

# Running a model needs a fraction of what training and the tests do.
$(VENV)/.installed-base: pyproject.toml
	$(PYTHON_BASE) -m venv $(VENV)
	$(INSTALL) .
	touch $@

# Three workers start at once: without bytecode each would make that of all packages, which takes both cores 20 seconds.
# Some packages bring files that this Python cannot compile, and nobody imports: they are left out.
$(VENV)/.installed: pyproject.toml
	$(PYTHON_BASE) -m venv $(VENV)
	$(INSTALL) '.[train,test]'
	$(PYTHON) -m compileall -qq --workers 0 $(VENV)/lib dflash_jax pallas_kernels || true
	touch $@-base $@

install: $(VENV)/.installed

## Serve the embedded pair at http://127.0.0.1:8000; FLAGS adds what `python -m dflash_jax.serve --help` lists.
serve: $(VENV)/.installed-base
	$(PYTHON) -m dflash_jax.serve $(FLAGS)

# On two cores, two workers left 8 % of the time idle, waiting for servers to start and to end; three take some 12 GB.
# The tests of a file stay with one worker, which compiles what they share once.
## Lint, type-check and run the test suite (no GPU, no torch). Installs chromium with apt-get unless BROWSER=none is given.
test: install browser
	$(PYTHON) -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The server's page is tested in a real browser, which no Python package brings along. BROWSER=none leaves it out.
browser:
	@if [ "$(BROWSER)" = none ]; then \
		echo "BROWSER=none: nothing is installed on the system, and tests of the page are skipped if there is no chromium"; \
	elif ! command -v chromium >/dev/null; then \
		echo "tests of the page need chromium: installing it on this system with apt-get (make test BROWSER=none does without)"; \
		{ apt-get update && apt-get install --yes chromium; } >/dev/null 2>&1 \
			|| echo "chromium could not be installed: tests of the page will be skipped"; \
	fi

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: install
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

## Stream code from the embedded pair, then show its acceptance and its speed beside plain decoding.
demo: $(VENV)/.installed-base
	$(PYTHON) -m dflash_jax.generate --compare

## Run every command of the documents that needs neither a GPU nor a download; FLAGS adds --list, --only PATTERN, ...
readme: install
	$(PYTHON) scripts/run_readme.py $(FLAGS)

## Compare the targets with transformers' models live; needs the CPU build of torch (Python 3.11).
parity: install
	$(INSTALL) '.[train,test,parity]'
	DFLASH_TEST_PARITY=1 $(PYTHON) -m pytest tests/parity

## Run six coding agents and three SDKs, unmodified, against a server. They come from npm and PyPI, 2.5 GB once.
AGENTS ?= /tmp/dflash-agents
test-agents: install
	$(PYTHON) -m tests.agents.install $(AGENTS)
	DFLASH_TEST_AGENTS=$(AGENTS) $(PYTHON) -m pytest tests/agents

## The tests that a GPU can run, the `gpu` ones included, on a machine that already has jax for it and pytest.
test-gpu:
	DFLASH_TEST_GPU=1 XLA_PYTHON_CLIENT_PREALLOCATE=false python3 -m pytest --override-ini addopts='-q --strict-markers'

## Run replicas on this machine's CPU, on Ray Serve and behind routers; kill, update and scale them (eight minutes).
test-ray: install
	$(INSTALL) '.[train,test,ray,routers]'
	DFLASH_TEST_RAY=1 $(PYTHON) -m pytest tests/replicas

## Write the versions that are installed here into constraints.txt; run `make clean install test` before.
constraints: install
	{ grep '^#' constraints.txt; $(PYTHON) -m pip freeze --exclude-editable; } >constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV)
