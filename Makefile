# Two targets do all the set-up: `make demo` and `make test`. Both are idempotent; the second time they install nothing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTERS ?= 2
# Modules are compiled behind it, on all cores: pip does that on one.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(TESTERS) --dist worksteal

.PHONY: demo gpu gpu-report gpu-wheels test docs figures nightly check lint types compiled pytest clean help install

help:
	@echo "make demo    install into $(VENV) when needed, then measure, plan, simulate, train and compare (about a minute)"
	@echo "make test    install into $(VENV) when needed, then lint, type check and test (a quarter of an hour on two cores; TESTERS=N for N processes)"
	@echo "make nightly  as make test, and the long tests: some of them take a quarter of an hour"
	@echo "make docs    the pages as a site, in build/site (two minutes)"
	@echo "make figures make the pictures of README.md and docs/ again (three minutes)"
	@echo "make gpu     on a borrowed GPU, with the PyTorch of PYTHON: tests, measurement, comparisons, campaign; can be continued"
	@echo "make gpu-wheels  the few packages that such a machine may lack, for its Python, in the folder WHEELS"
	@echo "make gpu-report  the page of what it found, GPU_OUT/gpu.md"
	@echo "make clean   remove $(VENV) and the demo's output"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tierplan needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) -e '.[runtime,cluster,docs,dev]'
	PYTHONWARNINGS=ignore $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true # what no Python can read is left
	@touch $(STAMP)

GPU_OUT ?= gpu-results
GPU_TAR ?=
WHEELS ?= wheels
GPU_PYTHON ?= 3.12
# What a machine with PyTorch and its usual companions lacks. All of it: nothing is fetched there, needs of these included.
GPU_PACKAGES := simpy highspy tomli_w msgspec shtab
GPU_FLAGS_ALL = --out $(GPU_OUT) $(if $(GPU_TAR),--tar $(GPU_TAR))

gpu-wheels:
	$(PYTHON) -m pip download --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -c constraints.txt -d $(WHEELS) $(GPU_PACKAGES)

gpu: # without network; missing packages are installed from wheels in WHEELS; GPU_FLAGS="--device cpu --tiny" tries it on the CPU
	$(PYTHON) -m benchmarks.gpu $(GPU_FLAGS_ALL) --wheels $(WHEELS) $(GPU_FLAGS)

gpu-report: $(STAMP)
	$(BIN)/python -m benchmarks.gpu $(GPU_FLAGS_ALL) --report

demo: $(STAMP)
	$(BIN)/tierplan demo

docs: $(STAMP)
	$(BIN)/tierplan page -o docs/what-if-grid.html --quick --keep build/what-if-grid
	$(BIN)/mkdocs build --strict
	@echo build/site/index.html

figures: $(STAMP)
	$(BIN)/python -m docs.figures.make

test: $(STAMP) lint
	$(MAKE) -j2 types compiled
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Modules, and the simulator's machine code, which each process of the tests would make for itself, also where the
# environment asks Python to write none (`PYTHONDONTWRITEBYTECODE`); any question of several devices.
compiled: $(STAMP)
	$(BIN)/python -m compileall -q hwmodels planner runtime sim tierplan validation
	$(BIN)/tierplan advise --quick --model gpt2 --machine roundpipe-8x4090 > /dev/null

nightly: $(STAMP) lint types
	$(PYTEST) -m "nightly or not nightly"

pytest: $(STAMP)
	$(PYTEST)

check: lint types

clean:
	rm -rf $(VENV) tierplan-demo
