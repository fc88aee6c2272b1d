# make study   the environment, the default study, and report.html
# make test    the same environment, lint and tests
# make faults                kills, damage, full disks, bad hubs: minutes each
# make fuzz                  a hundred thousand hostile files for the readers
# make benchmark             our cache and sweep beside a plain implementation
# make lock    envs/lock from the pins of pyproject.toml                      (envs/README.md)
# make image   the container image, with podman or docker                     (envs/README.md)
# make proof-image           the study inside the image and outside: the same SHA256SUMS
# make proof-slurm           the study on a one-node SLURM while jobs and the node's daemon are killed
# make proof-llama-cpp       llama.cpp with a quantized cache, and the same quantizer here, on the same tokens
# make processors            numeric tests and the small study as if on several processors: the same bytes, or numbers?
# make clean-study STUDY=S   remove everything that was made of the study S

PYTHON ?= python3
STUDY ?= demo
# cpu or cuda: the build of torch; empty: the CPU's where the package index has it, else the index's own.
TORCH ?=
VENV := .venv
INSTALLED := $(VENV)/installed
export STUDY
# A pip.conf with user = true would have packages outside the environment, which pip refuses.
export PIP_USER := 0
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: study report test faults fuzz env lock image proof-image proof-slurm proof-llama-cpp processors benchmark clean-study

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
	pytest -n 2 --dist loadfile

faults: $(INSTALLED)
	pytest -m faults

fuzz: $(INSTALLED)
	pytest -m fuzz

env: $(INSTALLED)

# The stamp is newer than the pins once everything is installed, so pip runs only when they change.
$(INSTALLED): envs/install.sh $(wildcard envs/lock/*.txt) pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11, 3.12 or 3.13 is needed, $(PYTHON) is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	sh envs/install.sh $(VENV)/bin/python $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# After an edit of the pins in pyproject.toml; LOCK=--upgrade moves everything else too.
lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	PATH="$(CURDIR)/build/uv/bin:$$PATH" $(PYTHON) envs/lock.py $(LOCK)

# The tag follows what the image is made of, for Snakemake does not notice another image under the same tag.
image: VARIANT := $(or $(TORCH),cpu)
image:
	@set -e; mkdir -p build; engine=$(ENGINE); \
	: "$${engine:=$$(command -v podman || command -v docker || echo none)}"; \
	test "$$engine" != none || { echo "make image: neither podman nor docker was found" >&2; exit 1; }; \
	made_of=$$({ cat envs/Containerfile envs/install.sh envs/lock/*; echo "$(BASE)"; } | sha256sum | cut -c 1-12); \
	tag=localhost/kvstages:$(VARIANT)-$$made_of; \
	$$engine build --file envs/Containerfile --build-arg VARIANT=$(VARIANT) $(if $(BASE),--build-arg BASE=$(BASE)) \
		$(IMAGE_FLAGS) --tag $$tag envs; \
	echo "image: $$tag"; \
	echo "$$tag" > build/image

proof-image: $(INSTALLED) image
	proofs/image.sh

proof-llama-cpp: $(INSTALLED)
	python proofs/engine_llama_cpp.py

processors: $(INSTALLED)
	python proofs/processors.py

proof-slurm: $(INSTALLED)
	proofs/slurm.sh

benchmark: $(INSTALLED)
	python -m benchmarks

# A name of a study as the configuration takes them; nothing else may reach rm, and resources/bundled is no study.
clean-study:
	@case "$$STUDY" in \
		'' | bundled | bundled-model | results | -* | *[!a-z0-9-]*) \
			echo "STUDY='$$STUDY': expected the name of a study, such as STUDY=demo" >&2; exit 1;; \
	esac
	rm -rf resources/$(STUDY) results/$(STUDY) .ledger/resources/$(STUDY) .ledger/results/$(STUDY)
	rm -rf .ledger/finished/resources/$(STUDY) .ledger/finished/results/$(STUDY) .ledger/benchmarks/$(STUDY)
	rm -rf logs/*/$(STUDY) logs/*/$(STUDY).log benchmarks/*/$(STUDY) benchmarks/*/$(STUDY).tsv benchmarks/$(STUDY)
