# Two commands for a fresh machine with Python 3.11 or newer: `make demo` and `make test`. Everything goes into
# $(VENV).
VENV ?= .venv
PYTHONS := python3.11 python3.12 python3.13 python3
# The first of them that is there, runs, and can make virtual environments.
PYTHON ?= $(shell for python in $(PYTHONS); do \
	if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$python; break; fi; done)
NO_PYTHON := no Python 3.11 or newer with venv was found (tried $(PYTHONS)). Install one, as with \
	"apt install python3.12 python3.12-venv", "brew install python@3.12", or from https://www.python.org/downloads/; \
	or name one that is elsewhere: make PYTHON=/path/to/python
TORCH ?= torch==2.13.0
TIMM ?= timm==1.0.31
# Trainers that tests train with, in $(VENV)/trainers, where tests/conftest.py looks for them; without their
# dependencies, so that no other PyTorch comes with them: Lightning, TRL, Sentence Transformers and what
# these need.
TRAINERS ?= lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 trl==1.16.0 datasets==5.2.0 \
	pyarrow==26.0.1 pandas==3.1.1 dill==0.4.1 xxhash==4.1.0 multiprocess==0.70.19 \
	sentence-transformers==6.2.0 scikit-learn==1.9.1 scipy==1.17.1 joblib==1.6.0 cloudpickle==3.1.3 narwhals==2.29.0 \
	threadpoolctl==3.8.0
TORCHVISION ?= torchvision==0.28.0
OUT ?= out
# Hundreds of processes of tests import PyTorch: the first compiles it.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# Python compiles what is imported when it is; most of what is installed never is.
PIP := $(BIN)/python -m pip install --quiet --no-compile
# One thread for each of the two test workers, so that they do not fight over cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help venv packages demo test compat compat-all test-all lint format schema picture reports docs zoo operators random mutations bench clean

help:  ## List these commands.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

venv: $(BIN)/.installed $(BIN)/.trainers $(BIN)/.torchvision  ## Make the virtual environment; with -j2, faster.

$(BIN)/.made:
	$(if $(wildcard $(BIN)/python),,$(or $(PYTHON),$(error $(NO_PYTHON))) -m venv $(VENV))
	touch $@

# torch comes first and by itself: a later install finds it there and leaves it alone.
$(BIN)/.installed: pyproject.toml | $(BIN)/.made
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps "$(TIMM)"
	touch $@

$(BIN)/.trainers: pyproject.toml Makefile | $(BIN)/.made
	$(PIP) --no-deps --upgrade --target $(VENV)/trainers $(TRAINERS)
	touch $@

# torchvision lies beside the other packages, where only the zoo looks for it (tests/zoo/torchvision_shim.py): where
# its build does not go with torch, libraries that find it fail.
$(BIN)/.torchvision: pyproject.toml | $(BIN)/.made
	$(PIP) --no-deps --upgrade --target $(VENV)/torchvision "$(TORCHVISION)"
	touch $@

packages: venv $(VENV)/packages  ## Install the packages that the zoo has models of, apart from the others.

$(VENV)/packages: tests/zoo/packages.txt
	$(PIP) --no-deps --upgrade --target $@ --requirement $<
	touch $@

demo: venv  ## Plan a BERT for 60 % of its memory, train with the plan, compare with the unplanned step.
	mkdir -p $(OUT)
	$(BIN)/python examples/bert.py --budget 60% --plan $(OUT)/bert-plan.json
	$(BIN)/python -m planner show $(OUT)/bert-plan.json

TESTS := not heavy

test: venv  ## Run the tests that take seconds.
	$(PYTEST) -m "$(TESTS)" -n 2

compat:  ## Run these, and all of replaying, with another PyTorch (some gigabytes): make compat TORCH=2.15.0
	$(MAKE) test TESTS="not heavy or any_torch" VENV=$(VENV)-$(TORCH:torch==%=%) TORCH=torch==$(TORCH:torch==%=%)

# The oldest release that plans run on, and those between it and the newest.
RELEASES := 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0

compat-all:  ## Run them with every release of PyTorch that is supported (some gigabytes each).
	failed=; for release in $(RELEASES); do $(MAKE) compat TORCH=$$release || failed="$$failed $$release"; done; \
	test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

test-all: venv  ## Run all tests.
	$(PYTEST) -n 2 --dist worksteal

lint: venv  ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv  ## Lay out the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: venv  ## Write docs/plan.schema.json from the code.
	$(BIN)/python -m planner schema --output docs/plan.schema.json

docs: $(BIN)/.docs  ## Build the documentation site into $(OUT)/site; warnings, dead links among them, are errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir $(abspath $(OUT))/site

# The site is built from the text of the code: no PyTorch is needed for it, only what makes pages.
$(BIN)/.docs: pyproject.toml | $(BIN)/.installed
	$(PIP) --editable ".[docs]"
	touch $@

picture: venv  ## Draw the picture of the README from the demo's plan.
	mkdir -p $(OUT)
	$(BIN)/python examples/bert.py --budget 60% --plan $(OUT)/bert-plan.json --steps 0
	$(BIN)/python -m planner show $(OUT)/bert-plan.json --figure docs/bert.svg

reports: venv  ## Plan three models and measure their reports in Chromium: docs/results/reports.md and its pictures.
	$(BIN)/python benchmarks/reports.py --plans $(OUT)/reports --pictures docs --out docs/results/reports.md

zoo: venv packages  ## Plan, run and compare every model of the zoo; writes docs/zoo.md. Takes an hour; goes on where it stopped.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/zoo.py --results $(OUT)/zoo.jsonl --out docs/zoo.md

operators: venv  ## Plan, run and compare PyTorch's operators and modules; writes docs/results/operators.md. Takes two hours; goes on where it stopped.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/operators.py --results $(OUT)/operators.jsonl --out docs/results/operators.md

random: venv  ## Plan, run and compare COUNT=100 modules of random operations, from seed FIRST=0 on; half an hour.
	for kind in sequences images; do OMP_NUM_THREADS=1 $(BIN)/python benchmarks/random_modules.py \
		--kind $$kind --first $(or $(FIRST),0) --count $(or $(COUNT),100) || exit 1; done

mutations: venv  ## Disable each safeguard in a copy: a test must fail. Writes docs/results/mutations.md; half an hour.
	$(BIN)/python benchmarks/mutate.py --out docs/results/mutations.md

bench: venv  ## Run the benchmarks, one after the other.
	for script in simulate allocator capture host_time; do echo "== $$script"; $(BIN)/python benchmarks/$$script.py || exit 1; done
	$(BIN)/python benchmarks/frontier.py --quick --out $(OUT)/frontier
	$(BIN)/python benchmarks/scaling.py --quick

clean:  ## Remove what these commands made, the virtual environment as well.
	rm -rf $(VENV) $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
