# Two commands for a fresh machine; each sets up .venv by itself.
#   make demo   runs the main job: purchase documents in, reasoning and answers out
#   make test   lint, format, types, tests, examples

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types unit clean

# torch is asked for by its exact version: an open range would take a CUDA build of several GB
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -P examples/tally/demo.py

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	mkdir -p .types/batchmla && cd .types/batchmla && ln -sfn ../../batchmla/* ../../kernels ../../jobs .
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -q --durations=15

clean:
	rm -rf $(VENV) .types build *.egg-info
