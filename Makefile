# make demo: what sharing does, on a small model.  make test: the whole suite.  make lint: ruff and mypy.
# make bench: all benchmarks beside all peers, 25 minutes on a quiet machine; make bench-quick: a share, 3 minutes.
# make bench-tree, bench-hits: what the tree costs, what the scheduling policies share; see benchmarks/RESULTS.md.
#
# All of it happens in .venv, which is made once and brought up to date when pyproject.toml or constraints.txt change.
# pip picks the build of torch: a CPU build where an index or a folder offers one, else the platform's default. For
# another one (a GPU's, say) run `make .venv/.made` and install torch 2.13.0 into .venv from where that build is; it is
# then kept.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet install --constraint constraints.txt
MODEL := smollm2-135m

.DELETE_ON_ERROR:
.PHONY: demo test lint pyright docs clean bench bench-quick bench-tree bench-hits

# The first run fetches the model (93 to 270 MB) and keeps it in the user's cache.
demo: $(VENV)/.installed
	$(PY) -m branchwise demo

# Without a network the tests that need the model say why they were skipped; with CI set they fail instead.
test: $(VENV)/.installed-dev
	@$(PY) -m branchwise models fetch $(MODEL) || echo "going on without $(MODEL)" >&2
	$(PY) -m pytest -m "slow or not slow"

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	rm -rf build && mkdir build
	$(PY) -m build --wheel --no-isolation --outdir build/wheel . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	$(PIP) --no-deps --target build/typed/site build/wheel/branchwise-*.whl
	cp tests/typing/*.py build/typed/
	cd build/typed && MYPYPATH=site ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml program.py programs.py

# The same programs by pyright, which needs Node.js and gets its code from npm at its first run.
pyright: $(VENV)/.installed-dev
	$(PY) -m pip --disable-pip-version-check --quiet install pyright==1.1.414
	$(VENV)/bin/pyright --pythonpath $(PY)

# Sets up the peers first, each in an environment of its own in the user's cache (or $BRANCHWISE_BENCH).
bench: $(VENV)/.installed
	$(PY) benchmarks/run.py

bench-quick: $(VENV)/.installed
	$(PY) benchmarks/run.py --quick

bench-tree: $(VENV)/.installed
	$(PY) benchmarks/tree.py

bench-hits: $(VENV)/.installed
	$(PY) benchmarks/hit_rate.py

# The site of the documents, into build/site. Its pictures are made by `python docs/pictures.py`.
docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --config-file docs/website/mkdocs.yml

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "branchwise needs Python 3.11 or newer, and \
	$(PYTHON) is `$(PYTHON) --version 2>&1`. Say which to use: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	touch $@
