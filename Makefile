# Two commands for a stranger: `make demo` and `make test`. Both set everything up first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types real setup clean

demo: setup
	$(BIN)/epcache demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

setup: $(VENV)/installed

# The stamp is remade when the dependencies change; an editable install follows the sources by itself.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("epcache needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# cli/ and pipelines/ install as epcache.cli and epcache.pipelines; links show mypy the same tree.
types: setup
	mkdir -p build/types/epcache
	ln -sfn $(CURDIR)/epcache/* build/types/epcache/
	ln -sfn $(CURDIR)/cli $(CURDIR)/pipelines $(CURDIR)/data_manifests build/types/epcache/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p epcache

# Tests that need the real weights and drawings, and the slow ones.
real: setup
	$(BIN)/python -m pytest -q -m 'slow or real'

clean:
	rm -rf $(VENV) build *.egg-info
