# Commands for a fresh machine; each sets up .venv by itself.
#   make demo   runs the main job: purchase documents in, reasoning and answers out
#   make test   lint, format, types, tests, examples
#   make test-integrations   the examples for schedulers with Airflow and Dagster themselves, all of Ray's tests, twenty kills, SmolLM2 beside transformers

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types unit replicas kernels kernels-newest test-integrations clean

# torch is asked for by its exact version: an open range would take a CUDA build of several GB
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -P examples/tally/demo.py

test: lint types unit replicas kernels

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	mkdir -p .types/batchmla && cd .types/batchmla && ln -sfn ../../batchmla/* ../../kernels ../../jobs .
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -q --durations=15 -n 2 --dist loadfile --ignore=tests/gpu \
		--ignore-glob="*/test_replicas*.py" --ignore=tests/examples/test_ray.py \
		$(foreach each,$(LONG),--deselect $(each))

# the longest tests, which test-integrations runs
LONG := tests/acceptance/test_kill_tally.py::test_twenty_kills_lose_and_double_nothing \
	tests/examples/test_smollm2_greedy.py::test_greedy_ids_equal_transformers_up_to_near_ties
LONG_RAY := is_killed_leaves and not even_when_killed and not has_lost_all_replicas \
	and not another_node_that_hangs and not loses_a_node and not ranks_on_all_nodes \
	and not while_it_loads

# Ray leaves threads behind in the process that it was used from
replicas: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -q --durations=10 -n 2 --dist loadfile -k "not $(LONG_RAY)" \
		tests/jobs/test_replicas*.py

# Triton decides when imported whether it interprets or compiles: a process for each
kernels: $(STAMP)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -P -m pytest -q --durations=10 -n 2 tests/gpu
	OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -q --durations=10 -n 2 tests/gpu

# the same with the newest Triton, which may fail: it tells what is to come
kernels-newest: $(STAMP)
	test -d .triton-newest || $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --target .triton-newest triton
	OMP_NUM_THREADS=1 PYTHONPATH=.triton-newest $(BIN)/python -P -m pytest -q -n 2 tests/gpu/compiled
	OMP_NUM_THREADS=1 PYTHONPATH=.triton-newest TRITON_INTERPRET=1 $(BIN)/python -P -m pytest -q -n 2 tests/gpu/interpreted

# each library in an environment of its own, since they disagree about others
test-integrations: $(STAMP)
	set -e; for name in airflow dagster; do \
		home=.venv-integrations/$$name; \
		test -x $$home/bin/python || $(BIN)/python -m venv $$home; \
		$$home/bin/python -m pip install --quiet --disable-pip-version-check \
			-r examples/$$name/requirements.txt; \
	done
	OMP_NUM_THREADS=1 $(BIN)/python -P -m pytest -q -rs tests/examples/test_pipelines.py tests/examples/test_ray.py \
		tests/jobs/test_replicas.py tests/jobs/test_replicas_process.py tests/jobs/test_replicas_spread.py $(LONG)

clean:
	rm -rf $(VENV) .triton-newest .venv-integrations .types build *.egg-info
