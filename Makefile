# `make help` lists the targets. `make demo` is a first look and needs Python 3.11, nothing else.
#
# All that is made lands in .venv; stamp files keep repeated runs quick.

SHELL := bash
PYTHON ?= python3
# Servers that `make servers` installs and the tests start
SERVERS ?= redis mariadb postgresql zookeeper memcached etcd mongodb-standin
# What is no stand-in
REAL = $(filter-out %-standin,$(SERVERS))
# Other Pythons that `make pythons` looks for
PYTHONS ?= 3.12 3.13 3.14
# Parts of `make matrix`, as tests/matrix.sh explains them; the servers are downloaded to ~/.cache/aiolock
MATRIX ?= pythons oldest newest mysql9.7 mariadb11.8 postgresql15 model interop gate
# More arguments for pytest
PYTEST_ARGS ?=
# What `make bench` measures: suites, --quick, --out DIR; `.venv/bin/python -m benchmarks --help` lists them
BENCH_ARGS ?= all

# The programs that tests start by the thousand are compiled once, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

RUN := .venv/bin/python
INSTALL := $(RUN) -m pip install --quiet --editable

.PHONY: help check demo demo-flash-sale test mongodb coverage test-under-load lint types pythons oldest newest matrix interop docs bench scoreboard servers clean distclean

# Prints the comments that begin with `##`
help:
	@echo "Times on two cores that do nothing else; on a busy machine several times as long."
	@grep -hE '^## ' $(MAKEFILE_LIST) | sed 's/^## //'

## make check             before each commit: ruff, mypy, unit tests, contract on memory and Redis (2 min)
check: .venv/dev.stamp
	@tests/install.sh redis
	@PYTHON="$(RUN)" tests/check.sh $(PYTEST_ARGS)

## make demo              a first look, in memory: needs no server (5 s; the first call installs for 12 s)
demo: .venv/demo.stamp
	$(RUN) -m aiolock demo

## make demo-flash-sale   every way to sell the last items, with and without locks, on a server of each kind (2 to 10 min)
demo-flash-sale: .venv/dev.stamp
	@tests/install.sh redis mariadb zookeeper memcached etcd
	$(RUN) -m examples.flash_sale

## make test              all tests with one version of each server; prints little, failures last (24 min)
test: .venv/dev.stamp .venv-arq/arq.stamp servers
	AIOLOCK_SERVERS="$(SERVERS)" PYTHON="$(RUN)" tests/all.sh $(PYTEST_ARGS)

## make mongodb           all tests of MongoDB on a real one: URL=mongodb://user:password@host/database?replicaSet=rs0 (15 min)
mongodb: .venv/dev.stamp
	AIOLOCK_WHOLE_CONTRACT=1 AIOLOCK_SERVERS= PYTHONASYNCIODEBUG=1 $(RUN) -m pytest --mongodb-url="$(URL)" -k mongodb -W "ignore:unclosed :ResourceWarning" \
		tests/contract tests/backends/mongodb $(PYTEST_ARGS)

## make coverage          the same, and the lines and branches of the library that no test reaches (40 min: an estimate)
coverage: export COVERAGE := 1
coverage: test

## make test-under-load   unit tests and contract beside eight busy processes per core (40 min)
test-under-load: .venv/dev.stamp servers
	AIOLOCK_SERVERS="$(REAL)" PYTHON="$(RUN)" tests/under_load.sh $(PYTEST_ARGS)

## make lint              ruff (5 s)
lint: .venv/dev.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

## make types             mypy and pyright, also as a user of the package (1 min)
# Pyright is told the environment by the PATH, because --verifytypes ignores --pythonpath. Its second run asks what a
# user's type checker would: is everything public fully typed?
types: export PATH := $(CURDIR)/.venv/bin:$(PATH)
types: .venv/dev.stamp
	mypy
	pyright
	python tests/typing/verify.py

## make pythons           the contract with the other Pythons of this machine (5 min)
pythons: servers
	AIOLOCK_SERVERS="$(REAL)" tests/pythons.sh $(PYTHONS)

## make oldest | newest   tests with the oldest or newest drivers and frameworks that pyproject.toml admits (7 | 10 min)
oldest newest: .venv-arq/arq.stamp servers
	PYTHON="$(PYTHON)" tests/dependencies.sh $@ $(PYTEST_ARGS)

## make matrix            other Pythons, servers and dependencies, eager tasks, the model, benchmarks --gate (100 min)
# SERVERS is what the other Pythons are tested with, MATRIX says what is tested
matrix: .venv/dev.stamp .venv/bench.stamp .venv-arq/arq.stamp servers
	AIOLOCK_SERVERS="$(REAL)" PYTHON="$(RUN)" PYTHONS="$(PYTHONS)" tests/matrix.sh $(MATRIX)

## make interop           locks that are shared with real libraries of Go: needs Go, or INTEROP_WITHOUT=go (2 min)
interop: .venv/dev.stamp servers
	$(RUN) -m tests.interop

## make docs              the documentation, in build/docs, without dead links (1 min)
docs: .venv/docs.stamp
	rm -rf build/docs
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --builder html docs build/docs
	$(RUN) docs/links.py build/docs
	$(RUN) docs/search.py build/docs
	@echo "build/docs/index.html"

## make bench             benchmarks (40 min; BENCH_ARGS="redis --quick" less than 1 min)
bench: .venv/bench.stamp servers
	$(RUN) -m benchmarks $(BENCH_ARGS)

## make scoreboard        the promised figures under faults, measured (25 min)
scoreboard: .venv/dev.stamp servers
	$(RUN) -m tests.scoreboard

servers:
	@tests/install.sh $(SERVERS) prometheus

## make clean | distclean remove what was built | the environments as well (1 s)
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

# arq admits no redis-py as new as that of the tests
.venv-arq/arq.stamp: pyproject.toml
	@tests/venv.sh .venv-arq "$(PYTHON)"
	.venv-arq/bin/python -m pip install --quiet --editable '.[redis]' --group arq
	@touch $@

.venv/docs.stamp: pyproject.toml | .venv/bin/python
	$(INSTALL) '.[all]' --group docs
	@touch $@

.venv/bench.stamp: pyproject.toml | .venv/bin/python
	$(INSTALL) '.[redis,zookeeper,mysql,postgresql,etcd,mongodb,aiohttp]' --group bench
	@touch $@
