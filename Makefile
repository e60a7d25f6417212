# Two commands for a fresh machine: `make demo` and `make test`. Each sets up what it needs in its own environment, .venv.
# To use an environment that has torch already (a GPU machine, say): make demo PYTHON=python3 VENV=
PYTHON ?= python3
VENV ?= .venv
STAMP := $(if $(VENV),$(VENV)/installed)
RUN := $(if $(VENV),$(VENV)/bin/python,PYTHONPATH=. $(PYTHON))

OLDEST := build/transformers-5.17
OPTIONAL := build/optional
VLLM := build/vllm

.PHONY: demo test test-oldest test-optional test-packed test-vllm lint clean

demo: $(STAMP)
	$(RUN) scripts/demo.py

# The first line: parity with all experts packed; `make test-packed` runs more suites so.
test: $(STAMP) lint
	HF_HUB_OFFLINE=1 HF_PREFETCH_TEST_PACKED=1 $(RUN) -m pytest $(if $(VENV),-n 2) tests/test_parity.py
	HF_HUB_OFFLINE=1 $(RUN) -m pytest $(if $(VENV),-n 2 --dist loadfile) $(PYTEST)

# Every architecture and number format, with the oldest transformers that is supported.
test-oldest: $(STAMP) $(OLDEST)/installed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(OLDEST) $(VENV)/bin/python -m pytest -n 2 tests/test_architectures.py tests/test_formats.py

# Formats and adapters of other libraries. transformers imports these wherever they are installed, which takes seconds and
# prints: so they are there for these tests only.
test-optional: $(STAMP) $(OPTIONAL)/installed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(OPTIONAL) $(VENV)/bin/python -m pytest -n 2 tests/test_formats.py tests/test_adapters.py

# The suites of what is done with weights, with all of them packed. Tests that are marked `raw` are left out.
test-packed: $(STAMP)
	HF_HUB_OFFLINE=1 HF_PREFETCH_TEST_PACKED=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile $(addprefix tests/test_,\
		adapters.py cache_on_fake_device.py capture.py faults.py generation.py lookahead_order.py models_on_fake_device.py \
		parity.py partial_residency.py routed_rows.py)
	HF_HUB_OFFLINE=1 HF_PREFETCH_TEST_PACKED=1 $(VENV)/bin/python -m pytest -n 2 tests/test_architectures.py -k bfloat16

# The vLLM plugin, in an environment of its own with vLLM's CPU build: it pins another transformers.
test-vllm: $(VLLM)/installed
	PYTHONPATH=tests:. $(VLLM)/bin/python -m pytest tests_vllm $(PYTEST)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

$(VENV)/installed: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --requirement requirements-dev.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

$(OLDEST)/installed: requirements-oldest.txt $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(OLDEST) --requirement requirements-oldest.txt
	touch $@

$(OPTIONAL)/installed: $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(OPTIONAL) torchao==0.18.0 peft==0.21.2 \
		bitsandbytes==0.50.2 compressed-tensors==0.20.1 loguru==0.7.3
	touch $@

$(VLLM)/installed: requirements-vllm.txt requirements-vllm-bare.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --requirement requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement requirements-vllm-bare.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
