# make demo    a first look; needs Python 3.11, nothing else
# make test    everything the tests need (servers by apt), then all tests
#
# All that is made lands in .venv; stamp files keep repeated runs quick.

SHELL := bash
PYTHON ?= python3
# Servers that `make servers` installs and the tests start
SERVERS ?= redis mariadb zookeeper
# Other Pythons that `make pythons` looks for
PYTHONS ?= 3.12 3.13
# Parts of `make matrix`: `pythons`, and servers that are downloaded to ~/.cache/aiolock
MATRIX ?= pythons mysql9.7 mariadb11.8
# More arguments for pytest
PYTEST_ARGS ?=
# What `make bench` measures: suites, --quick, --out DIR; `.venv/bin/python -m benchmarks --help` lists them
BENCH_ARGS ?= all

RUN := .venv/bin/python
INSTALL := $(RUN) -m pip install --quiet --editable

.PHONY: help demo demo-flash-sale test test-under-load lint types pythons oldest matrix docs bench scoreboard servers clean distclean

help:
	@echo "make demo | demo-flash-sale | test | test-under-load | lint | types | pythons | oldest | matrix | docs | bench | scoreboard | servers | clean | distclean"

demo: .venv/demo.stamp
	$(RUN) -m aiolock demo

# Four ways to sell the last items, and what they sell too much; starts its own Redis and MariaDB
demo-flash-sale: .venv/dev.stamp
	@tests/install.sh redis mariadb
	$(RUN) -m examples.flash_sale

test: .venv/dev.stamp servers
	AIOLOCK_SERVERS="$(SERVERS)" PYTHON="$(RUN)" tests/all.sh $(PYTEST_ARGS)

# Unit tests and the contract beside eight busy processes per core; up to 40 minutes on two cores
test-under-load: .venv/dev.stamp servers
	AIOLOCK_SERVERS="$(SERVERS)" PYTHON="$(RUN)" tests/under_load.sh $(PYTEST_ARGS)

lint: .venv/dev.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Pyright is told the environment by the PATH, because --verifytypes ignores --pythonpath. Its second run asks what a
# user's type checker would: is everything public fully typed?
types: export PATH := $(CURDIR)/.venv/bin:$(PATH)
types: .venv/dev.stamp
	mypy
	pyright
	python tests/typing/verify.py

pythons: servers
	AIOLOCK_SERVERS="$(SERVERS)" tests/pythons.sh $(PYTHONS)

# The oldest versions of drivers and frameworks that pyproject.toml admits
oldest: servers
	AIOLOCK_SERVERS="$(SERVERS)" PYTHON="$(PYTHON)" tests/oldest.sh $(PYTEST_ARGS)

# SERVERS is what the other Pythons are tested with, MATRIX says what is tested
matrix: .venv/dev.stamp servers
	AIOLOCK_SERVERS="$(SERVERS)" PYTHON="$(RUN)" PYTHONS="$(PYTHONS)" tests/matrix.sh $(MATRIX)

docs: .venv/docs.stamp
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs
	@echo "build/docs/index.html"

bench: .venv/bench.stamp servers
	$(RUN) -m benchmarks $(BENCH_ARGS)

scoreboard: .venv/dev.stamp servers
	$(RUN) -m tests.scoreboard

servers:
	@tests/install.sh $(SERVERS)

clean:
	rm -rf build dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean
	rm -rf .venv .venv-*

.venv/bin/python:
	@tests/venv.sh .venv "$(PYTHON)"

.venv/demo.stamp: pyproject.toml | .venv/bin/python
	$(INSTALL) .
	@touch $@

.venv/dev.stamp: pyproject.toml | .venv/bin/python
	$(INSTALL) '.[all]' --group test --group lint
	@touch $@

.venv/docs.stamp: pyproject.toml | .venv/bin/python
	$(INSTALL) '.[all]' --group docs
	@touch $@

.venv/bench.stamp: pyproject.toml | .venv/bin/python
	$(INSTALL) '.[redis,zookeeper,mysql]' --group bench
	@touch $@
