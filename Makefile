# make study   the environment, the default study, and report.html
# make test    the same environment, lint and tests
# make faults                kills, damage, full disks, bad hubs: minutes each
# make fuzz                  a hundred thousand hostile files for the readers
# make benchmark             our cache and sweep beside a plain implementation
# make clean-study STUDY=S   remove everything that was made of the study S

PYTHON ?= python3
STUDY ?= embedded
VENV := .venv
INSTALLED := $(VENV)/installed
export STUDY
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: study report test faults fuzz env benchmark clean-study

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

faults: $(INSTALLED)
	pytest -m faults

fuzz: $(INSTALLED)
	pytest -m fuzz

env: $(INSTALLED)

# The stamp is newer than the pins once everything is installed, so pip runs only when they change.
$(INSTALLED): envs/requirements.txt envs/requirements-dev.txt envs/lock.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint envs/lock.txt \
		--requirement envs/requirements.txt --requirement envs/requirements-dev.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

benchmark: $(INSTALLED)
	python -m benchmarks

# A name of a study as the configuration takes them; nothing else may reach rm, and resources/bundled is no study.
clean-study:
	@case "$$STUDY" in \
		'' | bundled | -* | *[!a-z0-9-]*) \
			echo "STUDY='$$STUDY': expected the name of a study, such as STUDY=embedded" >&2; exit 1;; \
	esac
	rm -rf resources/$(STUDY) results/$(STUDY) .made/resources/$(STUDY) .made/results/$(STUDY)
	rm -rf logs/*/$(STUDY) logs/*/$(STUDY).log
