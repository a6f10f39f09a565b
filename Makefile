# make test | demo | bench | models | sweep | fuzz | format | clean
#
# make fuzz N=10000 SEED=0 compares that many random programs of each grammar with eager; GRAMMAR=tensors,
# state or reads draws one of them, FIRST=10000 continues a run.
#
# make models NAMES="timm peft:LoraConfig" trains models of other libraries against eager; all of them without NAMES.
#
# An interpreter that already has torch (in range) and pytest is used as it is, and nothing is installed: this is
# how the targets run where there is no network. Any other interpreter only serves to make .venv, with the torch of
# constraints.txt, or another one: make TORCH=2.15.0 test.

PYTHON ?= python3
N      ?= 10000
SEED   ?= 0
FIRST  ?= 0
GRAMMAR ?= all
VENV   := .venv

WANTED := $(TORCH)
TORCH  ?= $(shell sed -n 's/^torch==//p' constraints.txt)
STAMP  := $(VENV)/.installed-torch-$(TORCH)

READY := $(shell $(PYTHON) -c 'import sys; from importlib.metadata import version; version("pytest"); \
	full = version("torch").split("+")[0]; torch = tuple(map(int, full.split(".")[:2])); \
	sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12) or not (2, 11) <= torch <= (2, 15) \
	or "$(WANTED)" not in ("", full))' \
	2>/dev/null && echo yes)

ifeq ($(READY),yes)
PY    := $(PYTHON)
SETUP :=
MODELS :=
else
PY    := $(VENV)/bin/python
SETUP := $(STAMP)
MODELS := $(STAMP)-models
endif

# Found without being installed, also by the processes that tests and benchmarks start.
export PYTHONPATH := $(CURDIR)/src:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# $(call optional,module,command): run the command, or say that it was left out.
define optional
@if $(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("$(1)") is None)'; \
	then echo '$(2)'; $(2); else echo 'skipped, $(1) is not installed: $(2)'; fi
endef

NAMES  ?=

.PHONY: test demo bench models sweep fuzz format clean

test: $(SETUP)
	$(call optional,ruff,$(PY) -m ruff check .)
	$(call optional,ruff,$(PY) -m ruff format --check .)
	$(call optional,mypy,$(PY) -m mypy --strict src fuzz)
	@# Each file in a process of its own, two at a time; the sweep has a target of its own.
	@{ find tests -name 'test_*.py' -not -path 'tests/sweep/*'; echo src; echo fuzz; } | xargs -P 2 -n 1 $(PY) -m pytest -q

demo: $(SETUP)
	@# Torch's profiler measures the peaks, and says more about itself than anybody asked.
	KINETO_LOG_LEVEL=9 TORCH_CPP_LOG_LEVEL=ERROR $(PY) examples/train_gpt.py

bench: $(SETUP)
	$(PY) -m benchmarks

models: $(SETUP) $(MODELS)
	$(PY) -m models $(NAMES) --table build/models.md

sweep: $(SETUP)
	$(PY) -m pytest -m sweep

fuzz: $(SETUP)
	$(PY) -m fuzz --programs $(N) --seed $(SEED) --first $(FIRST) --grammar $(GRAMMAR)

format: $(SETUP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 12) else \
		"Foregrad needs Python 3.11 or 3.12: make PYTHON=/path/to/python3.11")'
	@# Some systems ship Python without ensurepip; their own pip can fill the environment from outside.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(VENV)/bin/python install pip; }
	@# The torch that was asked for, and the rest as constraints.txt says.
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(VENV)/bin/python -m pip install --constraint $(VENV)/constraints.txt --editable '.[dev,demo]'
	@rm -f $(VENV)/.installed*
	@touch $@

$(STAMP)-models: $(STAMP)
	$(VENV)/bin/python -m pip install --constraint $(VENV)/constraints.txt --editable '.[dev,demo,models]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find src tests fuzz benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
