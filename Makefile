# Two commands do everything: `make demo` and `make test`. Each sets up what it needs first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
# The callbacks are tried with the real libraries, which are large: in an environment of their own.
CALLBACKS := build/callbacks/venv
# Which jobs the demo runs: one or two.
MIX ?= one
# Debian's packages by name: Slurm and munge for the real cluster, slurmdbd and its database for a cluster with accounting,
# slurmrestd as one of the doors to it, both Lua interpreters for job_submit.lua, a compiler for plugin and stand-in,
# systemd-analyze for the units, strace for what they allow, and mandoc for the man pages.
APT_PACKAGES := python3 python3-venv gcc libc6-dev make slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libslurm-dev \
	slurmdbd mariadb-server slurmrestd lua5.1 lua5.4 systemd strace mandoc

# Debian releases with other generations of Slurm; those of MATRIX_TRY only where they can be built.
MATRIX ?= trixie testing
MATRIX_TRY ?=

.PHONY: help demo test test-matrix hardware-checks lint bench science screenshots mutants clean setup system native

help:
	@echo "make demo     show the main job on a real Slurm cluster with simulated GPUs"
	@echo "make test     run all tests"
	@echo "make test-matrix  what holds for every Slurm, on that of Debian 13 and of Debian testing"
	@echo "make test-callbacks  try the callbacks in tiny trainings with the real libraries"
	@echo "make hardware-checks  read the GPUs of this machine as the agent does (read-only)"
	@echo "make lint     ruff, mypy --strict"
	@echo "make bench    speed and memory, written to build/bench"
	@echo "make science  the studies of docs/science.md, written to build/science (some ten minutes)"
	@echo "make screenshots  the pictures of the README, by headless Chromium from a demo run"
	@echo "make mutants  prove that planted faults are caught"
	@echo "make clean    remove what was built"

demo: setup
	$(PY) -m testbed.demo --mix $(MIX)

# Cluster tests that measure times run alone; the others share the cores. One thread each for linear algebra.
test: export OPENBLAS_NUM_THREADS := 1
test: setup
	$(PY) -m pytest -m "cluster and not generations"
	$(PY) -m pytest tests/cluster -m generations -n auto --dist loadfile
	$(PY) -m pytest -m "not cluster and not gpu" -n auto

test-matrix: setup
	@./etc/install-system-packages debootstrap
	$(PY) -m testbed.roots $(MATRIX) --where-possible $(MATRIX_TRY)

# Where there is an NVIDIA GPU: reads it through the agent's own code, writes nothing.
hardware-checks: $(VENV)/.ready
	$(PY) -m pytest -q -s -m gpu tests/hardware

test-callbacks: setup $(CALLBACKS)/.ready
	$(CALLBACKS)/bin/python -m pytest tests/callbacks --timeout 300

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: setup
	$(PY) -m bench.prolog
	$(PY) -m bench.agent
	$(PY) -m bench.device
	$(PY) -m bench.chaos
	$(PY) -m bench.controller
	$(PY) -m bench.solve
	$(PY) -m bench.learner
	$(PY) -m bench.answers
	$(PY) -m bench.live
	$(PY) -m bench.start_latency
	$(PY) -m bench.slurm_load

science: setup
	@./bench/science

# The README's pictures, of a demo run just now.
screenshots: demo
	@./etc/install-system-packages chromium
	mkdir -p docs/images
	$(PY) -m testbed.screenshot build/demo/report.html docs/images/report.png --size 1280x1480
	$(PY) -m testbed.screenshot build/demo/report.html docs/images/runs.png --size 1280x740 --top 1735

mutants: setup
	$(PY) -m testbed.mutants

setup: system $(VENV)/.ready native

system:
	@./etc/install-system-packages $(APT_PACKAGES)

$(VENV)/.ready: pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# A CPU build of torch; no torchvision, which nothing here needs.
$(CALLBACKS)/.ready: pyproject.toml
	python3 -m venv $(CALLBACKS)
	$(CALLBACKS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 transformers accelerate \
		lightning pytorch-lightning pytest pytest-timeout --editable .
	touch $@

native: $(VENV)/.ready
	@$(MAKE) --no-print-directory -C nvml_standin PYTHON=$(abspath $(PY))
	@$(MAKE) --no-print-directory -C spank

clean:
	rm -rf build $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	@$(MAKE) --no-print-directory -C nvml_standin clean
	@$(MAKE) --no-print-directory -C spank clean
