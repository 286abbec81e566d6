# make quickstart | test | lint | bench | clean; PYTHON=python3.12 picks another.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test lint bench clean

quickstart: $(VENV)/requirements.txt.done
	$(BIN)/python -m launch.main --config=configs/quickstart.py

# Two processes with half of the files each; the one that is done first helps.
test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/requirements-test.txt.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/requirements.txt.done
	$(BIN)/python -m benchmarks.optimizer_step

$(VENV)/requirements-test.txt.done: requirements.txt
$(VENV)/%.done: %
	@$(PYTHON) -c 'import sys; \
	  v = sys.version_info; \
	  sys.exit(None if (3, 11) <= v[:2] <= (3, 13) else \
	    f"error: Python {v[0]}.{v[1]} is too old or too new: " \
	    "run make PYTHON=python3.11 (or 3.12, 3.13)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r $<
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
