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
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy src/surefoot benchmarks

# Most tests compute on one core or wait for processes: two files at a time keep two cores busy.
WORKERS ?= 2

test: lint
	$(BIN)/python -m pytest -m "not campaign" -n $(WORKERS) --dist loadfile tests

campaign: install
	$(BIN)/python -m pytest -m campaign tests

bench: install
	$(BIN)/surefoot bench all

clean:
	rm -rf $(VENV)
