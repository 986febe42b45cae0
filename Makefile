# Everything below runs in .venv; `make env` creates it, and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --editable
# One thread per process: a pipeline has several processes, and they share the cores.
export OMP_NUM_THREADS ?= 1
# As many tests at a time as there are cores; each has its own ports, files and processes.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: env demo test test-slow test-all coverage faults resumes exhaustive gpu lint types layers format bench \
  docs wheel clean

env: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) '.[dev]'
	touch $@

demo: env
	$(BIN)/python examples/demo.py

test: lint types layers
	$(PYTEST) -m "not slow"

test-slow: env
	$(PYTEST) -m slow

test-all: lint types layers
	$(PYTEST)

# Half an hour at most; `python tests/faults/laboratory.py --help` says what else it can do.
faults: env
	$(BIN)/python tests/faults/laboratory.py --draws 300 --minutes 30

# From every checkpoint of every way to train: half an hour, beside what test-slow runs of it.
resumes: env
	$(PYTEST) -m "exhaustive or slow" tests/integration/test_resume_everywhere.py

# What no other run has of many alike cases: trainings drawn by chance beside their reference, ways
# to start and to end, examples, and what `resumes` runs. About two hours.
exhaustive: env
	$(PYTEST) -m exhaustive

# On a machine with a GPU, or several: ten minutes at most, one JSON, one log, and a row for the guide.
gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tests.gpu.main --folder runs/gpu

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

layers: env
	$(BIN)/lint-imports --no-logo

# What their unit tests reach of ir and simulation, and the floor below it. Apart from `make test`,
# since tracing makes tests of pure Python about twice as slow.
coverage: env
	$(BIN)/python -m pytest --quiet -m "not slow" --cov --cov-report term:skip-covered \
	  --override-ini timeout=400 tests/unit/ir tests/unit/simulation

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: env
	mkdir -p runs/bench
	$(BIN)/python benchmarks/throughput/main.py --quick --json runs/bench/throughput.json
	$(BIN)/python benchmarks/emulated/main.py --quick --json runs/bench/emulated.json

# Source distribution and wheel, into dist/; `make test-slow` tests what is built like this.
wheel: env
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m pytest --quiet -m slow tests/unit/test_wheel.py

docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(STAMP)-docs: $(STAMP)
	$(PIP) '.[docs]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache runs site dist
