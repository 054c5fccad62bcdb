# Everything on a fresh machine: `make demo` or `make test`. Both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# CPU development pins the torch release; the published requirement is a range.
TORCH ?= torch==2.13.0

.PHONY: install demo lint check test soak campaign bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: install
	$(BIN)/surefoot demo

lint: install
	$(BIN)/ruff check src tests examples benchmarks docs/builders/worked_example
	$(BIN)/ruff format --check src tests examples benchmarks docs/builders/worked_example
	$(BIN)/mypy src/surefoot benchmarks

# Tests that start no trainers and wait for nothing, but for the planner's long ones.
PURE := tests/core tests/data tests/money tests/simulation tests/docs/test_held.py \
	tests/test_board.py tests/test_home.py tests/test_imports.py tests/test_segment.py tests/test_wire.py \
	$(addprefix --ignore=tests/money/test_,engines.py calibration.py planner.py page.py money_cli.py mix.py)
# A file at a time and worker, in the order that tests/conftest.py gives: long ones first. Where real processes run, a
# worker waits for almost half of its time: three keep two cores busy.
WORKERS ?= 3
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Some hundred tests stop and kill processes at moments that a busy machine may make them miss. What fails is tried once
# more; if it passes then, its name still ends the output, for it is a fault to be looked for, of the test or of the
# code. Where nothing depends on a moment nothing is tried again, nor after the fifth failure.
AGAIN := --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks \
	--rerun-exclude-path tests/core --rerun-exclude-path tests/simulation
# A test that hangs is ended with the stack of each of its threads, and fails. None waits that long for its children.
ENDS_IN = -o faulthandler_exit_on_timeout=true -o faulthandler_timeout

check: WORKERS = 2
check: lint
	$(BIN)/python -m pytest -q -m "not soak and not campaign" $(SPREAD) $(ENDS_IN)=60 $(PURE)

# The whole run has an hour: what is left of a run whose worker was ended must not wait for ever.
test: lint
	timeout -k 10 3600 $(BIN)/python -m pytest -m "not soak and not campaign" $(SPREAD) $(AGAIN) $(ENDS_IN)=300 tests

# The long forms of what `test` has in short.
soak: install
	$(BIN)/python -m pytest -m soak $(SPREAD) $(AGAIN) $(ENDS_IN)=1800 tests

campaign: install
	$(BIN)/python -m pytest -m campaign tests

bench: install
	$(BIN)/python -m benchmarks all

clean:
	rm -rf $(VENV)
