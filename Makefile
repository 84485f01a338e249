# make chat    set up what the engine needs, fetch the default model, chat (with piped input: one answer)
# make setup   set up everything: engine, exercises, notebooks, tests
# make grade   grade your answers in exercises/
# make bench   the benchmark workloads that take no more than a minute each
#
# PY picks the interpreter (make chat PY=python3.11), PIP_ARGS is handed to pip.

PY ?= python3
PIP_ARGS ?=
WANTED := >= (3, 11)
EXTRAS := dev
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo -q) $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help chat setup grade bench model

help:
	@sed -nE 's/^# (make )/\1/p' Makefile; sed -nE 's/^# (PY )/\1/p' Makefile

chat: .venv/.runtime
	@$(BIN)/python -m minivllm

setup: .venv/.dev model

grade: .venv/.dev
	@$(BIN)/python -m minivllm grade || true

bench: .venv/.runtime
	@$(BIN)/python -m minivllm bench -w W1 -w W2 -w W3 -w W4

# What sets up writes to stderr only: the answer of `echo question | make chat` is all there is on stdout.

model: .venv/.runtime
	@$(BIN)/python -c "from minivllm.models.fetch import resolve_model; resolve_model(None)" >&2

.venv/.python:
	@$(PY) -c "import sys; sys.exit(not sys.version_info[:2] $(WANTED))" 2>/dev/null || { \
	  echo "minivllm needs Python 3.11 or newer; '$(PY)' is $$($(PY) --version 2>&1 | head -1)." >&2; \
	  echo "Install one and name it: make $(MAKECMDGOALS) PY=python3.11" >&2; exit 1; }
	@$(PY) -m venv .venv >&2
	@touch $@

.venv/.runtime: .venv/.python pyproject.toml
	@echo "Installing the engine into .venv (once; a minute or two) ..." >&2
	@$(PIP) -e . >&2
	@touch $@

.venv/.dev: .venv/.runtime pyproject.toml
	@echo "Installing what exercises, notebooks and tests need (once) ..." >&2
	@$(PIP) -e '.[$(EXTRAS)]' >&2
	@touch $@

# The rest is for those who change the engine or the course.
#
# make test    set up everything, run the tests
# make lint    formatting, lint, types, size
# make book    build the course book into book/_build/html
# make notebooks  write lessons/*.ipynb again from lessons/src

.PHONY: test lint book notebooks

test: .venv/.dev model
	@$(BIN)/python -m pytest -n auto -q

lint: .venv/.dev
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/python -m minivllm.course.size

book: .venv/.dev
	@$(BIN)/python -m book.build

notebooks: .venv/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m minivllm.course.weave
