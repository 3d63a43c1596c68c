# Everything this project can do; `make` alone lists it. Only Python 3.10 or newer and make are assumed: the first
# command that needs something installs it into .venv, with uv where there is uv, else with pip.

VENV := .venv
BIN := $(VENV)/bin
PYTHONS := $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10 python3.14 python
.DEFAULT_GOAL := help
.NOTPARALLEL:

# What is said on the command line travels through the environment, word for word, so that a prompt may hold
# apostrophes, quotes and dollar signs. A SIZE or an OUT that only happens to be in the environment is not meant.
SAID := PROMPT MODEL SIZE STEPS GUIDANCE SEED IMAGE OUT NB
$(foreach v,$(SAID),$(eval override $(v) := $(if $(findstring command,$(origin $(v))),$$(value $(v)))))
export $(SAID)

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s  %s\n", $$1, $$2}' Makefile
	@echo 'For example: make generate PROMPT="a red circle above a blue square" SEED=7 OUT=circle.png'

generate: has-prompt $(VENV)/.base ## draw PROMPT="…" (also MODEL, SIZE, STEPS, GUIDANCE, SEED, IMAGE, OUT)
	@$(BIN)/kleinlite generate $${MODEL:+--model "$$MODEL"} $${SIZE:+--size "$$SIZE"} \
	  $${STEPS:+--steps "$$STEPS"} $${GUIDANCE:+--guidance "$$GUIDANCE"} $${SEED:+--seed "$$SEED"} \
	  $${IMAGE:+--image "$$IMAGE"} $${OUT:+-o "$$OUT"} -- "$$PROMPT"

has-prompt:
	@test -n "$$PROMPT" || { echo 'Say what to draw: make generate PROMPT="a red circle above a blue square"'; exit 2; }

setup: $(VENV)/.test ## install what reading, building and testing the book takes

lab: $(VENV)/.book ## open the book in JupyterLab
	$(BIN)/jupyter-lab notebooks

test: check test-notebooks book ## all tests: the quick ones, every notebook from top to bottom, the site

check: lint ## the quick tests: promotion in step, lint, pytest, two files at a time
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

fuzz: $(VENV)/.test ## damage weight files and configs for ten minutes (SECONDS=600): all is read or refused in a sentence
	$(BIN)/python tests/models/fuzz.py $(or $(SECONDS),600)

lint: $(VENV)/.test ## promotion in step, every import downwards, and what linter and formatter would change
	$(BIN)/python -m kleinlite.book.promote --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache --no-logo

test-notebooks: $(VENV)/.test ## run every notebook and compare (nbval), two at a time
	$(if $(wildcard notebooks/*.ipynb),MLX_ENABLE_TF32=0 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -p nbval \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout 600 -n 2 --dist loadfile notebooks)

format: $(VENV)/.test ## let the formatter write notebooks and modules, then promote
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format
	$(BIN)/python -m kleinlite.book.promote

promote: $(VENV)/.book ## write the package from the notebooks
	$(BIN)/python -m kleinlite.book.promote

run-notebooks: $(VENV)/.book ## run the notebooks and store what they show (all, or NB="01 05")
	$(BIN)/python -m kleinlite.book.notebooks run $$NB

clean-notebooks: $(VENV)/.book ## tidy what a session in Jupyter stored (all, or NB="01 05")
	$(BIN)/python -m kleinlite.book.notebooks clean $$NB

parity: $(VENV)/.test ## compare every block with the reference again, and write the page that says how close
	$(BIN)/python tests/write_parity.py

bench-peers: $(VENV)/.book ## time every stage beside diffusers and mflux (installed apart), and write "How fast"; ARGS="--turns 2 --threads 1": minutes
	$(BIN)/python -m kleinlite.bench.peers $(ARGS)

bench-full: $(VENV)/.base ## write a random model as large as 4b, run it in three precisions, print what it costs
	$(BIN)/python -m kleinlite.bench.picture --full

book: $(VENV)/.book ## build the site into book/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mdbook build

serve: $(VENV)/.book ## show the site on this machine, and build it again on every change
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mdbook serve

clean: ## remove what can be made again, except .venv
	rm -rf book notebooks/live dist .pytest_cache .ruff_cache

.PHONY: help generate has-prompt setup lab test check lint test-notebooks format promote run-notebooks \
  clean-notebooks parity bench-peers bench-full book serve clean fuzz

# The environment. One stamp for what generating takes, one for the book, one for the tests; a newer pyproject.toml
# installs again.

$(VENV)/.base: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,.)
	@touch $@

$(VENV)/.book: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,.[book])
	@touch $(VENV)/.base $@

$(VENV)/.test: pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,.[test])
	@touch $(VENV)/.base $(VENV)/.book $@

HAS_UV := uv --version >/dev/null 2>&1

define install
@echo "Installing what this needs into $(VENV) ..."
@if $(HAS_UV) && uv pip install -q --python $(BIN)/python -e "$(1)"; then exit; fi; \
$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
$(BIN)/python -m pip install -q --disable-pip-version-check -e "$(1)" \
  && $(BIN)/python -m pip uninstall -qq -y rfc3987-syntax # see [tool.uv] in pyproject.toml
endef

$(VENV)/pyvenv.cfg:
	@for python in $(PYTHONS); do \
	  found=$$("$$python" -c 'import sys; sys.version_info >= (3, 10) and print(sys.executable)' 2>/dev/null); \
	  test -n "$$found" || continue; \
	  if $(HAS_UV); then uv venv -q --python "$$found" $(VENV); else "$$found" -m venv $(VENV); fi && exit; \
	  rm -rf $(VENV); \
	  echo "$$found could not make an environment: install its venv module (Debian: python3-venv), or uv."; exit 1; \
	done; \
	echo "Python 3.10 or newer was not found. Name one: make setup PYTHON=/path/to/python3"; exit 1
