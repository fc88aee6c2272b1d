# make study   the environment, the default study, and report.html
# make test    the same environment, lint and tests

PYTHON ?= python3
STUDY ?= embedded
VENV := .venv
INSTALLED := $(VENV)/installed
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: study report test env clean-study

study: $(INSTALLED)
	snakemake --cores 1 --resources gpu=1
	snakemake --report report.html

report: $(INSTALLED)
	snakemake --report report.html

test: $(INSTALLED)
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	snakemake --lint
	pytest

env: $(INSTALLED)

# The stamp is newer than the pins once everything is installed, so pip runs only when they change.
$(INSTALLED): envs/requirements.txt envs/requirements-dev.txt envs/lock.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint envs/lock.txt \
		--requirement envs/requirements.txt --requirement envs/requirements-dev.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean-study:
	rm -rf resources/$(STUDY) results/$(STUDY) logs/*/$(STUDY) logs/*/$(STUDY).log
