# Everything this project can do; `make` alone lists it. Only Python 3.11 or newer and make are assumed: the first
# command that needs something installs it into .venv, with uv where there is uv, else with pip.

VENV := .venv
BIN := $(VENV)/bin
LOWEST := $(VENV)/lowest
PYTHONS := $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python
.DEFAULT_GOAL := help
MLX ?= $(shell cat $(VENV)/.mlx 2>/dev/null)
BACKEND := $(if $(filter cuda12 cuda13,$(MLX)),-$(MLX))
# Three files at a time: many tests wait for a browser or a server.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile
.NOTPARALLEL:

# What is said on the command line travels through the environment, word for word, so that a prompt may hold
# apostrophes, quotes and dollar signs. A SIZE or an OUT that only happens to be in the environment is not meant.
# A word that is misspelled, or a prompt without quotes, is refused before anything is drawn.
SAID := PROMPT MODEL SIZE STEPS GUIDANCE NEGATIVE SEED IMAGE MASK STRENGTH EXTEND LORA LIKE QUANTIZE OUT NB ALL CH FOR RUNS ARGS WHO CHECK
UNKNOWN := $(filter-out $(SAID) MLX PYTHON SECONDS VENV -%,$(foreach v,$(.VARIABLES),$(if $(findstring command,$(origin $(v))),$(v))))
$(if $(UNKNOWN),$(error There is no $(UNKNOWN). There are $(SAID)))
$(if $(and $(filter generate,$(MAKECMDGOALS)),$(filter-out generate,$(MAKECMDGOALS))),$(error Put what is to be drawn in quotes: make generate PROMPT="a red house"))
$(foreach v,$(SAID),$(eval override $(v) := $(if $(findstring command,$(origin $(v))),$$(value $(v)))))
export $(SAID)

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s  %s\n", $$1, $$2}' Makefile
	@echo 'For example: make generate PROMPT="a red house under a yellow sun" SEED=7 OUT=house.png'
	@echo 'More is said by the command itself: source $(VENV)/bin/activate, then kleinlite --help'

generate: has-prompt $(VENV)/.base$(BACKEND) ## draw PROMPT="…" (also MODEL, QUANTIZE, SIZE, STEPS, SEED, IMAGE, LORA, LIKE, OUT, …)
	@$(BIN)/python -m kleinlite generate $${MODEL:+--model "$$MODEL"} $${QUANTIZE:+--quantize "$$QUANTIZE"} \
	  $${SIZE:+--size "$$SIZE"} $${STEPS:+--steps "$$STEPS"} $${GUIDANCE:+--guidance "$$GUIDANCE"} \
	  $${NEGATIVE:+--negative "$$NEGATIVE"} $${SEED:+--seed "$$SEED"} $${IMAGE:+--image "$$IMAGE"} \
	  $${MASK:+--mask "$$MASK"} $${STRENGTH:+--strength "$$STRENGTH"} $${EXTEND:+--extend "$$EXTEND"} \
	  $${LORA:+--lora "$$LORA"} $${LIKE:+--like "$$LIKE"} $${OUT:+-o "$$OUT"} $${PROMPT:+-- "$$PROMPT"}

has-prompt:
	@test -n "$$PROMPT$$LIKE" || { echo 'Say what to draw: make generate PROMPT="a red house under a yellow sun" SEED=7'; exit 2; }

setup: $(VENV)/.test$(BACKEND) ## install what reading, building and testing the book takes

lab: $(VENV)/.book$(BACKEND) ## open the book in JupyterLab, at chapter 0 (ARGS="--no-browser --allow-root" goes to jupyter-lab)
	@# its terminal is no part of this make, and a renamed clone is found by its kernels too
	@env -u MAKELEVEL -u MAKEFLAGS -u MAKEOVERRIDES PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
	  $(BIN)/python -m jupyterlab --ServerApp.root_dir=. --ContentsManager.pre_save_hook=tools.lab.keep_metadata notebooks/00_idea.ipynb $$ARGS

# Each to its end, whatever the ones before said; then all that failed is named.
each = @failed=; for step in $(1); do $(MAKE) --no-print-directory $$step || failed="$$failed $$step"; done; \
  test -z "$$failed" || { echo "Failed:$$failed"; exit 1; }

test: ## what a change has to pass: lint, quick tests, every notebook from top to bottom, the site
	$(call each,lint quick-tests test-notebooks book)

check: ## lint and quick tests
	$(call each,lint quick-tests)

test-all: ## everything, for a release: slow tests too, and the planted faults
	$(call each,lint all-tests test-notebooks book mutants)

quick-tests: $(VENV)/.test$(BACKEND) ## pytest without what is marked slow
	$(PYTEST) -m "not slow"

all-tests: $(VENV)/.test$(BACKEND) ## pytest, all of it
	$(PYTEST)

mutants: $(VENV)/.test$(BACKEND) ## plant 200 small faults, one at a time, and count which tests notice
	$(BIN)/python -m tools.mutants

test-lowest: $(VENV)/pyvenv.cfg ## the package's quick tests with the lowest versions that pyproject.toml allows
	@if $(HAS_UV); then test -d $(LOWEST) || uv venv -q --python $(BIN)/python $(LOWEST); \
	  else $(BIN)/python -m venv $(LOWEST); fi
	$(BIN)/python -m tools.lowest > $(LOWEST)/constraints.txt
	@if $(HAS_UV); then uv pip install -q --python $(LOWEST)/bin/python -c $(LOWEST)/constraints.txt -e . pytest hypothesis; \
	  else $(LOWEST)/bin/python -m pip install -q --disable-pip-version-check -c $(LOWEST)/constraints.txt -e . pytest hypothesis; fi
	OPENBLAS_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q tests/inference tests/models tests/trainer tests/test_files.py \
	  tests/cli tests/test_errors.py tests/test_pipeline_golden.py

fuzz: $(VENV)/.test$(BACKEND) ## damage weight files and adapters for ten minutes (SECONDS=600): all is read or refused in a sentence
	$(BIN)/python -m tools.fuzz $(or $(SECONDS),600)

lint: $(VENV)/.test$(BACKEND) ## promotion in step, types, every import downwards, and what linter and formatter would change
	$(BIN)/python -m tools.promote --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/deno lint
	$(BIN)/deno fmt --check
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

test-notebooks: $(VENV)/.test$(BACKEND) ## run the notebooks and compare (nbval), two at a time (all, or NB="07 14")
	MLX_ENABLE_TF32=0 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -p nbval --nbval-lax --nbval-current-env \
	  --nbval-cell-timeout 1800 -n 2 --dist loadfile $$($(BIN)/python -m tools.notebooks list $$NB)

format: $(VENV)/.test$(BACKEND) ## let the formatters write notebooks, modules and scripts, then promote
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format
	$(BIN)/deno fmt
	$(BIN)/python -m tools.promote

workbook: $(VENV)/.book$(BACKEND) ## write workbook/: every chapter with holes to fill, and a check behind each
	$(BIN)/python -m tools.workbook write

check-mine: has-chapter $(VENV)/.test$(BACKEND) ## put what you wrote in a workbook under the book's own tests (CH=05)
	$(BIN)/python -m tools.workbook check $$CH

certificate: $(VENV)/.test$(BACKEND) ## a picture that your workbook's code drew, once its tests pass (CH=05 WHO="Ada"; or CHECK=its file)
	@test -n "$$CHECK" || test -n "$$CH" -a -n "$$WHO" || { echo 'Say whose: make certificate CH=05 WHO="Ada", or CHECK=certificate-05.png'; exit 2; }
	@if test -n "$$CHECK"; then $(BIN)/python -m tools.certificate check "$$CHECK"; else $(BIN)/python -m tools.certificate "$$CH" "$$WHO"; fi

has-chapter:
	@test -n "$$CH" || { echo 'Say which chapter: make $(firstword $(MAKECMDGOALS)) CH=05'; exit 2; }

assignment: has-chapter $(VENV)/.book$(BACKEND) ## write a chapter's workbook with points (CH=05; FOR=nbgrader or otter)
	$(BIN)/python -m tools.assignment "$$CH" $$FOR

promote: $(VENV)/.book$(BACKEND) ## write the package from the notebooks
	$(BIN)/python -m tools.promote

run-notebooks: $(VENV)/.book$(BACKEND) ## run what changed and store what it shows, two at a time (or NB="01 05", or ALL=1)
	$(BIN)/python -m tools.notebooks run $${ALL:+--all} $$NB

clean-notebooks: $(VENV)/.book$(BACKEND) ## tidy what a session in Jupyter stored (all, or NB="01 05")
	$(BIN)/python -m tools.notebooks clean $$NB

nano: $(VENV)/.test$(BACKEND) ## a new klein-nano by the recipe, and all that follows from it (RUNS=folder; a day)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m recipe.bundle $${RUNS:-runs}

parity: $(VENV)/.test$(BACKEND) ## compare every block with the reference again, and write the page that says how close
	$(BIN)/python -m tools.write_parity

bench-peers: $(VENV)/.book$(BACKEND) ## time every stage beside diffusers and mflux (installed apart), and write "How fast"; ARGS="--turns 2 --threads 1": minutes
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench-full: $(VENV)/.base$(BACKEND) ## write a random model as large as 4b, run it in three precisions, print what it costs
	$(BIN)/python -m benchmarks.picture --full

book: $(VENV)/.book$(BACKEND) ## build the site into book/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mdbook build

pdf: $(VENV)/.test$(BACKEND) book ## print the book into kleinlite.pdf (takes a Chromium)
	$(BIN)/python -m tools.pdf

slides: $(VENV)/.test$(BACKEND) ## write a deck of slides for each chapter into slides/ (or CH="05 14")
	$(BIN)/python -m tools.slides $$CH

cards: $(VENV)/.book$(BACKEND) ## write the chapters' questions as cards for Anki
	$(BIN)/python -m tools.questions

serve: $(VENV)/.book$(BACKEND) ## show the site on this machine, and build it again on every change (ARGS="--port 3001")
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/mdbook serve $$ARGS || { echo 'Is the port taken? make serve ARGS="--port 3001"'; exit 1; }

clean: ## remove what can be made again, except .venv
	rm -rf book notebooks/live dist slides assignments kleinlite-cards.txt kleinlite.pdf .pytest_cache .ruff_cache

.PHONY: help generate has-prompt has-chapter setup lab test check test-all quick-tests all-tests mutants lint test-notebooks format \
  promote run-notebooks clean-notebooks parity bench-peers bench-full book serve clean fuzz workbook check-mine \
  test-lowest nano slides cards assignment certificate pdf

# The environment. One stamp for what generating takes, one for the book, one for the tests; a newer pyproject.toml
# installs again.

#
# MLX for an NVIDIA card: `make lab MLX=cuda12` (or cuda13; `MLX=cpu` goes back). The choice is remembered, so that no
# later make undoes it: mlx-cpu and mlx-cuda share a file and cannot both be installed.

$(VENV)/.base$(BACKEND): pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,.)
	@touch $@

$(VENV)/.book$(BACKEND): pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,.[book])
	@touch $(VENV)/.base$(BACKEND) $@

$(VENV)/.test$(BACKEND): pyproject.toml | $(VENV)/pyvenv.cfg
	$(call install,.[test])
	@touch $(VENV)/.base$(BACKEND) $(VENV)/.book$(BACKEND) $@

HAS_UV := uv --version >/dev/null 2>&1

define install
@echo "Installing what this needs into $(VENV): a minute or two, once ..."
@if $(HAS_UV) && uv pip install --python $(BIN)/python -e "$(1)"; then exit; fi; \
$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null; \
$(BIN)/python -m pip install --disable-pip-version-check -e "$(1)" \
  && $(BIN)/python -m pip uninstall -qq -y rfc3987-syntax # see [tool.uv] in pyproject.toml
$(if $(BACKEND),$(swap_backend))
@rm -f $(VENV)/.base* $(VENV)/.book* $(VENV)/.test* # of another backend
@echo "$(or $(MLX),cpu)" > $(VENV)/.mlx
endef

define swap_backend
@echo "Installing MLX for CUDA (over 1 GB of NVIDIA's libraries) ..."
@if $(HAS_UV); then uv pip uninstall -q --python $(BIN)/python mlx-cpu; \
  uv pip install -q --python $(BIN)/python --reinstall-package mlx --reinstall-package mlx-cuda-$(MLX:cuda%=%) "mlx[$(MLX)]"; \
else $(BIN)/python -m pip uninstall -qq -y mlx-cpu; \
  $(BIN)/python -m pip install -q --disable-pip-version-check --force-reinstall --no-deps mlx mlx-cuda-$(MLX:cuda%=%) \
  && $(BIN)/python -m pip install -q --disable-pip-version-check "mlx[$(MLX)]"; fi
endef

$(VENV)/pyvenv.cfg:
	@for python in $(PYTHONS); do \
	  found=$$("$$python" -c 'import sys; sys.version_info >= (3, 11) and print(sys.executable)' 2>/dev/null); \
	  test -n "$$found" || continue; \
	  if $(HAS_UV); then uv venv -q --python "$$found" $(VENV); else "$$found" -m venv $(VENV); fi && exit; \
	  rm -rf $(VENV); \
	  echo "$$found could not make an environment: install its venv module (Debian: python3-venv), or uv."; exit 1; \
	done; \
	if $(HAS_UV); then uv venv -q --python 3.12 $(VENV) && exit; fi; \
	echo "Python 3.11 or newer was not found. Install one (brew install python, apt install python3), let uv bring its own"; \
	echo "(https://docs.astral.sh/uv), or name one: make setup PYTHON=/path/to/python3"; exit 1
