# `make` prints what there is. Without PYTHON= on the command line everything runs in .venv, which is made on first use
# and again when constraints.txt or pyproject.toml change. With it (make gpu PYTHON=python3) that interpreter runs the
# tree as it stands, and nothing is installed.

PYTHON ?= python3

ifeq ($(origin PYTHON),command line)
  run := $(PYTHON)
  ready :=
  demo_ready :=
  dali :=
  ray :=
  site :=
  torchao :=
else
  run := .venv/bin/python
  ready := .venv/.installed
  demo_ready := $(or $(wildcard .venv/.installed),.venv/.demo)
  dali := .venv/.dali
  ray := .venv/.ray
  site := .venv/.site
  torchao := .venv/torchao/.installed
endif

# Tests in a process per core, where pytest-xdist is installed; each takes from the other's end when it has run its own.
workers = $(shell $(run) -c 'import xdist' 2>/dev/null && echo "-n auto --dist worksteal")

# In one process: beside another worker of pytest they once waited for ever. One that does ends the run with its stack.
dali_tests = tests/dataio/test_dali.py

# Bytecode is kept even where the environment says not to: without it each process of pytest takes 7 s to rewrite the
# assertions of all tests, and each script that a test starts compiles accel.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo demo-full test integrations suite slow lint docs dist bench gpu versions versions-test clean

help: ## print this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo 'PYTHON=...         use this interpreter as it is: no .venv, nothing installed'

demo: $(demo_ready) ## speed up a training loop on this machine and show the report: two minutes
	$(run) -m benchmarks.demo

demo-full: $(demo_ready) ## the same with two seeds and two epochs: five minutes
	$(run) -m benchmarks.demo --full

test: $(ready) ## the tests that need neither a GPU nor patience
	$(run) -m pytest -q -m "not slow and not gpu and not integration" $(workers)

integrations: $(ready) $(dali) $(ray) $(site) $(torchao) ## the tests under frameworks, with DALI, torchao, on a Ray cluster, on hosts under c10d and etcd; the notebook
	$(run) -m pytest -v -m "integration and not slow" $(workers) --ignore $(dali_tests)
	$(run) -m pytest -v -m integration $(dali_tests) -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true \
		|| [ $$? = 5 ] # no test, without simplejpeg
	PYTHONPATH=.venv/torchao $(run) -m pytest -q tests/accel/strategies/test_float8.py

suite: $(ready) ## models of the suite, step by step: accel is not slower than plain
	$(run) -m pytest -q -p benchmark benchmarks/suite

slow: $(ready) ## the slow suites: several processes, shaped networks, long runs, more examples
	$(run) -m pytest -m "slow or hypothesis"

lint: $(ready) ## style, format and types
	$(run) -m ruff check .
	$(run) -m ruff format --check .
	$(run) -m mypy

docs: $(ready) $(site) ## the manual as a site in build/docs, with the API from docstrings; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(run) -m mkdocs build --strict --quiet

dist: $(ready) ## the sdist and the wheel in dist/, tried as make integrations does
	rm -rf dist && mkdir dist
	$(run) -c "from setuptools import build_meta as build; build.build_sdist('dist'); build.build_wheel('dist')"
	$(run) -m pytest -q -m integration tests/test_distribution.py

bench: $(ready) ## the benchmarks of this machine
	$(run) -m benchmarks.run

gpu: $(ready) ## the GPU suite, JSON under benchmarks/results/
	$(run) -m benchmarks.gpu $(if $(LIMIT),--limit $(LIMIT))

versions-test: $(ready) ## the default tests under each supported torch, or VERSIONS="2.9.1 2.14.1=/path/to/python", JSON too
	$(run) -m benchmarks.torch_versions $(VERSIONS)

versions: $(ready) ## print the interpreter and the packages in use
	@$(run) -VV
	@$(run) -m pip list --format=freeze

clean: ## remove what builds, tests and linters leave behind (.venv* stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# 240 MB, 600 MB installed; made for Linux alone, so without it its tests are skipped.
.venv/.dali: .venv/.installed
	.venv/bin/python -m pip install --quiet -c constraints.txt nvidia-dali-cuda130 && touch $@ || echo "no DALI here: its tests are skipped"

# In a folder of its own: transformers imports it where it can, and it prints to stderr.
.venv/torchao/.installed: .venv/.installed
	.venv/bin/python -m pip install --quiet -c constraints.txt --no-deps --target .venv/torchao torchao && touch $@ || echo "no torchao here: its tests are skipped"

# 80 MB.
.venv/.ray: .venv/.installed
	.venv/bin/python -m pip install --quiet -c constraints.txt ray && touch $@ || echo "no Ray here: its tests are skipped"

# 40 MB: the site's builder, and what runs the notebook.
.venv/.site: .venv/.installed
	.venv/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[docs]' && touch $@ || echo "no MkDocs here: make docs fails, the notebook's test is skipped"

# setuptools comes first and pinned, so that building accel needs no second, unpinned one. The stamp is written last: an
# install that broke off is done again.
.venv/.installed: .venv/.demo
	.venv/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# What the demo needs, without the development tools.
.venv/.demo: constraints.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("constraints.txt needs Python 3.11 or later, found " + sys.version.split()[0] + "; name another: PYTHON=python3.12 make ...")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -c constraints.txt setuptools
	.venv/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[demo]'
	@touch $@
