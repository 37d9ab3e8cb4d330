PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
OLDEST := .venv-oldest
# Flower asks for newer versions of the others; the oldest of it is what every other environment has.
FLOWER := fedpop/flower tests/flower
# Where bytecode may not be kept, every worker and every child compiles the package and the tests again.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help demo test test-slow test-flower test-oldest lint docs pictures bench clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## Run the demonstration
	$(BIN)/fedpop demo

test: $(STAMP) ## Run the tests and the doctests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(STAMP) ## Run the slow statistical tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow tests

test-flower: $(STAMP) ## Run federations of real processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m flower tests/flower

test-oldest: $(STAMP) ## Run the tests with the oldest versions that are allowed
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable '.[test]'
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 2 $(addprefix --ignore=,$(FLOWER))

lint: $(STAMP) ## Check style, format, types and documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict fedpop research
	@$(MAKE) --no-print-directory docs

docs: $(STAMP) ## Build the documentation into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pictures: $(STAMP) ## Draw the documentation's pictures again, from small runs
	PYTHONPATH=. $(BIN)/python docs/pictures.py

bench: $(STAMP) ## Run the benchmarks
	$(BIN)/python -m benchmarks

clean: ## Remove caches and build output; keeps the environment, runs/ and records
	rm -rf $(OLDEST) build dist site .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@echo "Setting up $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@
