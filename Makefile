# make bench   times the model suites and writes gpu_nn.json
# make test    checks and tests
# Both install what they need first, into a virtual environment of their own, and only when
# something changed. PYTHON chooses the interpreter, ARGS goes to the benchmark or to pytest.

PYTHON = python3
ARGS =

.SHELLFLAGS = -euc
.DELETE_ON_ERROR:
.DEFAULT_GOAL = help
.PHONY: help bench test lint programs clean

# .venv for the default interpreter, .venv-3.13 and so on for a named one.
tag = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
suffix := $(if $(filter-out file default,$(origin PYTHON)),-$(tag))
venv = .venv$(suffix)
venv_programs = .venv-programs$(suffix)
sources = setup.cfg pyproject.toml

# With an NVIDIA driver JAX comes with its CUDA wheels, else JAX stays on the CPU.
gpu := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
wheels = $(if $(gpu),'jax[cuda13]')
platform = $(if $(gpu),,JAX_PLATFORMS=cpu)

# A package of JAX's own version, without what it requires.
companions = install --quiet --no-deps $(addsuffix ==$$($1/bin/python -c \
  'from importlib import metadata; print(metadata.version("jax"))'),$2)

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

bench: $(venv)/installed-bench
	$(venv)/bin/python -m bench --out gpu_nn.json $(ARGS)

test: lint
	$(platform) $(venv)/bin/python -m pytest --quiet -n 2 --dist loadfile $(ARGS)

lint: $(venv)/installed-test
	$(venv)/bin/ruff check --quiet
	$(venv)/bin/ruff format --check --quiet
	$(venv)/bin/lint-imports --no-logo

# Compiles whole programs for a GPU that need not be there.
programs: $(venv_programs)/installed
	$(venv_programs)/bin/python -m tools.programs $(or $(ARGS),--check)

clean:
	rm -rf .venv* build dist *.egg-info .*_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.PRECIOUS: %/pyvenv.cfg
%/pyvenv.cfg:
	$(PYTHON) -m venv $*

$(venv)/installed-bench: $(venv)/pyvenv.cfg $(sources)
	$(venv)/bin/pip install --quiet --editable . $(wheels)
	touch $@

# jax-triton lowers for a GPU only with JAX's GPU plugin. Alone it is silent; the jax-cuda13-pjrt
# that it requires makes JAX complain of the missing driver.
$(venv)/installed-test: $(venv)/pyvenv.cfg $(sources)
	$(venv)/bin/pip install --quiet --editable '.[test]' $(wheels)
	$(venv)/bin/pip $(call companions,$(venv),jax-cuda13-plugin)
	touch $@

$(venv_programs)/installed: $(venv_programs)/pyvenv.cfg $(sources)
	$(venv_programs)/bin/pip install --quiet --editable .
	$(venv_programs)/bin/pip $(call companions,$(venv_programs),jax-cuda13-plugin jax-cuda13-pjrt)
	touch $@
