# make run            a first look; sets up .venv when needed
# make test           every check except the long tests
# make test-all       the long tests too; run it before a release
# make mutation       how many small errors in the library the tests notice; takes hours, and continues where it was stopped;
#                     ARGS=--help explains it
# make docs           builds the documentation into dist/site
# make notebooks      runs the notebooks and keeps their output
# make release-check  builds the package, installs it into an environment of its own, and runs it in an empty folder
#
# ARGS are passed on, e.g. make run ARGS="--rounds 100". PYTHON=/path/to/python uses that environment without changing it.

VENV := .venv
ifdef PYTHON
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
endif

.PHONY: run test test-all mutation docs notebooks release-check
.DEFAULT_GOAL := run

run: $(if $(PYTHON),,$(VENV)/.ready-experiments)
	$(PY) -m experiments.quickstart $(ARGS)

test: $(if $(PYTHON),,$(VENV)/.ready-tests)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -n logical --maxprocesses 4 --dist loadgroup $(ARGS)

test-all: test
	$(PY) -m pytest -n logical --maxprocesses 4 --dist loadgroup -m long $(ARGS)

mutation: $(if $(PYTHON),,$(VENV)/.ready-tests)
	$(PY) -m tests.mutation $(ARGS)

docs: $(if $(PYTHON),,$(VENV)/.ready-docs)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)

notebooks: $(if $(PYTHON),,$(VENV)/.ready-docs)
	$(PY) docs/tools/notebooks.py $(ARGS)

release-check: $(if $(PYTHON),,$(VENV)/bin/python)
	$(PY) docs/tools/release_check.py $(ARGS)

$(VENV)/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: python3 must be 3.11 or newer; or use an environment of your own: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	python3 -m venv $(VENV)

# One stamp for each set of extras. A change of pyproject.toml installs again. If there is an NVIDIA GPU, `make run` uses it.
CUDA = $(if $(filter experiments,$*),$(if $(shell command -v nvidia-smi),$(shell echo ,cuda)))
$(VENV)/.ready-%: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(if $(CUDA),@echo "nvidia-smi is here: JAX is installed for CUDA")
	$(VENV)/bin/python -m pip install --quiet -e ".[$*$(CUDA)]"
	@touch $@
