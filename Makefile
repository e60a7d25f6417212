# Two commands for a fresh machine: `make demo` and `make test`. Each sets up what it needs in its own environment, .venv.
# To use an environment that has torch already (a GPU machine, say): make demo PYTHON=python3 VENV=
PYTHON ?= python3
VENV ?= .venv
STAMP := $(if $(VENV),$(VENV)/installed)
RUN := $(if $(VENV),$(VENV)/bin/python,PYTHONPATH=. $(PYTHON))

.PHONY: demo test lint clean

demo: $(STAMP)
	$(RUN) scripts/demo.py

test: $(STAMP) lint
	HF_HUB_OFFLINE=1 $(RUN) -m pytest $(if $(VENV),-n 2 --dist loadfile) $(PYTEST)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

$(VENV)/installed: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --requirement requirements-dev.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
