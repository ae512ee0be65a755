# Every target creates .venv and installs what it needs, once. PYTHON selects the interpreter (3.11 or newer), VENV another folder.
PYTHONS = 3.11 3.12 3.13
PYTHON ?= $(shell .ci/find_python $(PYTHONS))
VENV = .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Hundreds of processes are started: without compiled modules each takes ten seconds more to import torch.
unexport PYTHONDONTWRITEBYTECODE
# Processes of the tests: more than cores, because half of the tests wait most of their time.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 2)

.PHONY: help setup demo picture screenshots test test-fast test-py312 test-py313 test-slow test-slurm test-hosts recipes test-adapters chaos-buffer chaos soak wire-faults fuzz-ports check format bench gpu-check gpu-bench gpu-wheels docs docs-serve reference signatures clean

help:
	@echo "make demo       train a tiny model on this CPU (minutes)"
	@echo "make picture    the same, and its curve becomes docs/quickstart.png, which README.md shows"
	@echo "make screenshots  pictures of the page that async-rl view serves, for docs/view.md; needs chromium"
	@echo "make setup      install everything for development"
	@echo "make test-fast  unit tests, and the buffer's contracts in memory: those that take no seconds"
	@echo "make test       the CPU tests; SERVERS=all: on every Redis and Valkey found           make test-slow  the others: all layouts, long runs"
	@echo "make test-py312  the CPU tests on Python 3.12, with another megatron-core, in .venvs/py312; also: test-py313"
	@echo "make test-adapters  test every adapter with its library, in virtual environments (minutes, 3 GB)"
	@echo "make test-slurm  fleets on a real Slurm cluster on this machine (root; apt-get install slurm-wlm munge; minutes)"
	@echo "make test-hosts  a run on five hosts, which are network namespaces; some are cut off and come back (root; minutes)"
	@echo "make recipes    rehearse every recipe for ten steps, with small models"
	@echo "make chaos-buffer  kill the buffer's server, workers and learner 500 times (KILLS=); count what was lost or trained twice"
	@echo "make chaos      500 faults in whole runs (FAULTS=, SEED=), each audited      make soak  one run for an hour (MINUTES=)"
	@echo "make wire-faults  kill, stop, disconnect and crowd the weight wire, 100 times each (TRIALS=); look for torn or older weights"
	@echo "make fuzz-ports  send 10,000 malformed frames to every port of a run (FUZZ_SEED repeats one), which must continue"
	@echo "make check      all checks of CI: format, lint, types, import rules, spelling, tests"
	@echo "make format     format the code"
	@echo "make bench      the benchmarks, as one table          make gpu-check  check what works on this GPU, and how fast"
	@echo "make docs       the pages as a site with search, in build/docs; a wrong link fails      make docs-serve  the same, served on port 8000"
	@echo "make reference  write the pages of docs/ that are made from the code"
	@echo "make signatures  write the table of what released torch, Megatron and Transformer Engine take, from their sources"
	@echo "make gpu-bench  measure decoding, training and swaps on one GPU beside their goals; on a CPU a dry run"
	@echo "make gpu-wheels  fetch what a GPU machine without a package index lacks, into .whl/"
	@echo "make clean      remove caches and builds; .venv and runs/ stay"

setup: $(VENV)/.dev

demo: $(VENV)/.run
	@$(BIN)/async-rl run @ configs/quickstart.yaml

# Run the demo in a folder of its own and keep its curve, which README.md shows.
picture: $(VENV)/.run
	@folder=$$(mktemp -d) && $(BIN)/async-rl run @ configs/quickstart.yaml --run.folder $$folder --run.name quickstart \
		&& cp $$folder/quickstart/curves.png docs/quickstart.png && rm -r $$folder

screenshots: $(VENV)/.dev
	$(BIN)/python -m tests.support.screenshots docs/view

# SERVERS=all: the buffer's contracts run on every server found and on a Cluster, not only in memory and on the bundled server.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal $(TESTS)

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" -n auto --dist worksteal @.ci/tests_of_fast

# TESTS="tests/unit ..." selects some. Without that Python this fails; it never passes without having run.
test-py312 test-py313: test-py3%:
	@$(MAKE) --no-print-directory VENV=.venvs/py3$* PYTHONS=3.$* test

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

test-slurm: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/scenarios/clusters/test_slurm.py

test-hosts: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/scenarios/clusters/test_hosts.py

recipes: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/scenarios/whole_runs/test_recipes.py

test-adapters: $(VENV)/.dev
	@$(BIN)/python .ci/test_adapters.py $(ADAPTERS)

KILLS ?= 500
SEED ?= 1
chaos-buffer: $(VENV)/.dev
	$(BIN)/python -m tests.chaos.run --kills $(KILLS) --seed $(SEED) --report runs/chaos_buffer.json

FAULTS ?= 500
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos.pipeline.run --faults $(FAULTS) --seed $(SEED) --report runs/chaos.json $(WITH)

MINUTES ?= 60
soak: $(VENV)/.dev
	$(BIN)/python -m tests.chaos.pipeline.soak --minutes $(MINUTES) --seed $(SEED) --report runs/soak.json $(WITH)

TRIALS ?= 100
wire-faults: $(VENV)/.dev
	$(BIN)/python -m tests.wire_faults.run --trials $(TRIALS) --seed $(SEED) --report runs/wire_faults.json

fuzz-ports: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -s tests/scenarios/whole_runs/test_listeners.py

# Types are checked beside the tests, which leave cores idle while they wait.
check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell
	@said=$$(mktemp); $(BIN)/pyright > $$said 2>&1 & types=$$!; $(MAKE) --no-print-directory test; tests=$$?; \
		wait $$types; types=$$?; echo pyright: && cat $$said && rm $$said && exit $$((tests | types))

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/suite.py $(WITH)

gpu-check: $(VENV)/.run
	@$(BIN)/python benchmarks/gpu_check.py --json runs/gpu_check.json

docs: $(VENV)/.dev
	@rm -rf build/docs
	$(BIN)/python -m sphinx -W -q -E -c docs/site -d build/doctrees . build/docs

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs

reference: $(VENV)/.dev
	$(BIN)/async-rl config keys > docs/configuration_keys.md
	$(BIN)/async-rl metrics > docs/metric_names.md
	$(BIN)/async-rl verbs > docs/verbs.md
	$(BIN)/python docs/site/python_api.py > docs/python_api.md

# Fetches the sources that it reads, 14 MB, into .cache/. Run it when a call or a supported release is new.
signatures: $(VENV)/.dev
	$(BIN)/python -m tests.support.signatures.table

gpu-bench: $(VENV)/.run
	@$(BIN)/python benchmarks/gpu_bench.py $(WITH)

# What a GPU machine without a package index lacks. WITH="--python 3.13 --there torch numpy": what it has.
gpu-wheels: $(VENV)/.run
	@$(BIN)/python benchmarks/gpu_wheels.py $(WITH)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(BIN)/python:
	@python="$(PYTHON)"; [ -n "$$python" ] && "$$python" -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[plot]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@ $(VENV)/.run
