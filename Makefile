# Two commands do all the set-up: `make demo` and `make test`. Everything they install goes into .venv,
# everything they download or build goes into the user's cache (see src/clearhead/hub.py).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_REQUIRE_VIRTUALENV := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help demo test check docs aot36 constraints clean

help:
	@echo 'make demo   set up .venv, then decompose one attention layer of a real model and write its page (runs/demo)'
	@echo 'make test   set up .venv with the development tools, then run the whole test suite (no network)'
	@echo 'make check  lint, types, layer contract and documentation, in the same .venv'
	@echo 'make aot36  compile the GPU kernels with Triton 3.6 in an environment of its own and report spills (no GPU needed)'
	@echo 'make docs   build the documentation into site/'
	@echo 'make clean  remove .venv and what the tools cached in this directory (runs/ is kept)'

demo: $(VENV)/.installed
	@$(BIN)/clearhead demo

test: $(VENV)/.installed-dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile --basetemp=$(VENV)/test-tmp $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

# one stamp per step, so that an interrupted set-up continues where it stopped and a finished one costs nothing
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clearhead needs Python 3.11 or newer, \
	$(PYTHON) is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: constraints.txt $(VENV)/.created
	$(BIN)/python -m pip install --no-compile '$(TORCH)'
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.torch
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.torch
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

# no dependencies: torch from the package index pins another version of triton
$(VENV)/.aot36: constraints.txt $(VENV)/.created
	$(PYTHON) -m venv $(VENV)/aot36
	$(VENV)/aot36/bin/python -m pip install --no-compile '$(TORCH)' numpy jaxtyping
	$(VENV)/aot36/bin/python -m pip install --no-compile --no-deps triton==3.6.0
	@touch $@

aot36: $(VENV)/.aot36
	PYTHONPATH=src $(VENV)/aot36/bin/python -m clearhead.bench.aot

constraints: $(VENV)/.installed-dev
	@sed -n '/^#/p' constraints.txt > $(VENV)/constraints.new
	@$(BIN)/python -m pip freeze --exclude clearhead | sed 's/^\(torch==[^+]*\)+.*/\1/' >> $(VENV)/constraints.new
	@mv $(VENV)/constraints.new constraints.txt

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
