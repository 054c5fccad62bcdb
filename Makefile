# Everything on a fresh machine: `make demo` or `make test`. Both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# CPU development pins the torch release; the published requirement is a range.
TORCH ?= torch==2.13.0

.PHONY: install demo test lint bench campaign clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: install
	$(BIN)/surefoot demo

lint: install
	$(BIN)/ruff check src tests examples benchmarks docs/worked_example
	$(BIN)/ruff format --check src tests examples benchmarks docs/worked_example
	$(BIN)/mypy src/surefoot benchmarks

# Most tests compute on one core or wait for processes: two files at a time keep two cores busy.
WORKERS ?= 2
# Some hundred tests stop and kill processes at moments that a busy machine may make them miss. What fails is tried once
# more; if it passes then, its name and its traceback still end the output, for it is a fault to be looked for, of the
# test or of the code. Where nothing depends on a moment nothing is tried again, nor after the fifth failure.
AGAIN := --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks \
	--rerun-exclude-path tests/core --rerun-exclude-path tests/simulation
# None takes three minutes. One that hangs is ended with the stack of each of its threads, and fails.
BOUND := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

test: lint
	$(BIN)/python -m pytest -m "not campaign and not soak" -n $(WORKERS) --dist loadfile $(AGAIN) $(BOUND) tests

campaign: install
	$(BIN)/python -m pytest -m campaign tests

bench: install
	$(BIN)/python -m benchmarks all

clean:
	rm -rf $(VENV)
