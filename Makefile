# Every target sets up what it needs (see .ci/setup) and is quick the second time.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTEST_ARGS ?=
DEMO_ARGS ?=
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: help setup demo test lint format bench asan fuzz wheel browser clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## system libraries, .venv, the native core
	@./.ci/setup

demo: setup ## asynchronous RL with three replicas, one killed and replaced, every label checked
	@$(PY) -m stitch.cli demo $(DEMO_ARGS)

test: setup ## the whole test suite
	@$(PY) -m pytest -q -m "not browser and not packaging" $(PYTEST_ARGS)

lint: setup ## ruff, mypy, codespell, clang-format, clang-tidy
	@./.ci/lint

format: setup ## let ruff and clang-format rewrite the code
	@.venv/bin/ruff check -q --fix . ; .venv/bin/ruff format -q .
	@./.ci/lint format

bench: ## ratios against named baselines; writes build/bench.json (DOCS=1: and docs/benchmarks.md)
	@./.ci/setup wrk
	@mkdir -p build
	@$(PY) -m pytest -q bench -p no:cacheprovider --timeout=0 --benchmark-only --benchmark-json=build/bench.json $(PYTEST_ARGS)
	@$(PY) bench/report.py $(if $(DOCS),docs/benchmarks.md,build/bench.md)

asan: setup ## native tests under address, undefined-behaviour and thread sanitizers
	@./tests/native/run.sh address 5
	@./tests/native/run.sh thread 1

fuzz: setup ## time-bounded fuzzing of every native decoder under sanitizers
	@./tests/native/run.sh address $${FUZZ_SECONDS:-60}

wheel: setup ## a repaired wheel in dist/, and a check that it installs in an empty environment
	@./.ci/wheel

browser: setup ## the demo's HTML report in a real browser
	@./.ci/browser

clean: ## remove build products and the virtual environment
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out
