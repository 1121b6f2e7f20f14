# `make demo` and `make test` are complete from a bare clone, through `make install`.
# `make dist` builds the wheel and the sdist, and tests the wheel in an empty environment (dev/release.md).
# `make unit` runs the tests that start no process, train nothing and search for no plan. `make test` adds those
# that do, one to a few cases of each promise: eight minutes on two cores. `make test-all` runs every case,
# the slow tier and all recorded runs: about two hours. Run it before an issue is called resolved.
#
# Installing goes into a .venv of its own, with the versions of constraints.txt. torch comes first, so that a
# machine with another build of it (CUDA, ROCm) can put its own there before: see docs/quickstart.md, "Install".
# Nothing that follows exchanges it: constraints.txt holds its version, and Triton is the one that it asks for.
# `make demo` predicts, plans and trains on the CPU: one screen and a picture in half a minute. It needs neither
# the developer's tools nor Triton, Liger, torchao and DeepSpeed, and installs none; `make install` adds them, the
# latter on Linux alone, for which they are built. Elsewhere their tests are skipped.

PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.core
STAMP := .venv/.installed
SITE := .venv/.site

# Without compiled files, each worker would compile all modules and rewrite the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-all unit docs image lint types dist clean

install: $(STAMP)

$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[train,plots,bnb,peft]'
	touch $@

$(STAMP): $(CORE)
	$(BIN)/pip install -q -c constraints.txt -e '.[all,dev]'
	touch $@

$(SITE): $(CORE)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

demo: $(CORE)
	$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

test-all: install
	SNUGFIT_ALL_TRUTH=1 $(BIN)/python -m pytest -n 2 --dist worksteal

unit: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not whole and not slow'

docs: $(SITE)
	$(BIN)/python lab/site_pages.py
	$(BIN)/zensical build --strict --clean -f mkdocs.yml
	@echo 'To read it: $(BIN)/python -m http.server --directory build/site'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python lab/plan_counts.py
	$(BIN)/python lab/code_size.py
	$(BIN)/python lab/prose.py

types: install
	$(BIN)/mypy

# Needs root, buildah and debootstrap: container/README.md.
image: $(CORE)
	container/image.sh $(BIN)/python

dist: install
	$(BIN)/python lab/build_dist.py

clean:
	rm -rf .venv build/pages build/site dist snugfit-examples/demo.png .mypy_cache .ruff_cache .pytest_cache .rehearsals
