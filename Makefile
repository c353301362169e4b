# On a machine with Python 3.11+, pip and make: `make demo` answers the first question, `make test` checks everything.
# Both use .venv. A developer's install (editable, all extras) contains the light one, so where it is there `demo` uses it
# as it is; `test` puts the developer's install over the light one. Each stamp marks a finished install.

PYTHON ?= python3
SOURCES := $(shell find kvplan engine -name '*.py' -o -name '*.yaml') models.yaml

.PHONY: demo preflight gallery course demo-engine demo-serve test test-full test-exhaustive compile-table gpu constraints test-twin test-lowest times sbom hashes verify-hashes audit pins
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes, each of which would compile kvplan anew

demo: $(or $(wildcard .venv/dev.stamp),.venv/demo.stamp)
	.venv/bin/kvplan estimate llama-3.1-8b --ctx 32k --gpu a100-80g

gallery: .venv/dev.stamp # the pictures of docs/gallery.md, in the Chromium that is installed
	.venv/bin/python docs/pictures/gallery.py

course: .venv/dev.stamp # the chapters of docs/course as notebooks
	.venv/bin/python docs/course/notebooks.py

# `kvplan preflight` as one file, for a machine with nothing but Python.
preflight: $(or $(wildcard .venv/dev.stamp),.venv/demo.stamp)
	.venv/bin/python -m tests.support.single_file dist/kvplan-preflight.pyz

demo-engine: .venv/dev.stamp
	rm -rf runs/demo
	.venv/bin/kvplan profile -o runs/demo --num-seqs 24 --lengths uniform:40-160 --output-tokens 40 --num-blocks 96 \
		--max-num-batched-tokens 512 --baseline contiguous --baseline static # more requests than fit: what paging is for
	.venv/bin/kvplan report runs/demo -o runs/demo/report.html
	@echo open runs/demo/report.html

demo-serve: .venv/dev.stamp
	.venv/bin/python examples/serve_demo.py smollm2-135m --device cpu --dtype float32 --ctx 256 --max-num-seqs 4 \
		--max-num-batched-tokens 256 --num-gpu-blocks-override 100

test: .venv/dev.stamp
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	$(MAKE) --no-print-directory -j 2 types tests # mypy keeps one core busy

.PHONY: types tests
types: .venv/dev.stamp
	.venv/bin/mypy

tests: .venv/dev.stamp
	.venv/bin/pytest -n 2 --dist loadfile

test-full: .venv/dev.stamp # what is marked full, and every property once more with many examples
	.venv/bin/pytest -n 2 --dist loadfile -m "(full or hypothesis) and not exhaustive and not gpu" --hypothesis-profile full

test-exhaustive: .venv/dev.stamp # whole products, of which test-full has a part
	.venv/bin/pytest -n 2 --dist load -m exhaustive

# Where the processor time of `make test` goes; FULL=1: of test-full.
times: .venv/dev.stamp
	.venv/bin/python benchmarks/suite_times.py $(if $(FULL),-m "(full or hypothesis) and not exhaustive and not gpu" --hypothesis-profile full)

# The engine's tests with the GPU machines' Python, torch and numpy, where they are to be had; else a line says what is not.
test-twin:
	PYTHONPATH=. $(PYTHON) -m tests.support.twin

# The light install and serve with the lowest versions of pyproject.toml, where they are to be had; else a line says so.
test-lowest:
	PYTHONPATH=. $(PYTHON) -m tests.support.lowest

compile-table: .venv/dev.stamp
	.venv/bin/python -m tests.support.compile_kernels --table

# On a machine with a GPU, with its own python3 and torch; goes on where the last call stopped. Where each call gets a fresh
# copy of the checkout, lay what the last one left into build/gpu (which git ignores: have it copied all the same), name
# another OUT, and ask for the same kind of GPU. COMMIT is for a copy without .git. MINUTES=9 plans for so many minutes.
OUT ?= build/gpu
RESUME ?= $(firstword $(foreach folder,$(OUT) build/gpu,$(if $(wildcard $(folder)/summary.json),$(folder))))
gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py $(OUT) $(if $(MINUTES),--minutes $(MINUTES),--budget 480) $(addprefix --resume ,$(RESUME)) \
		$(addprefix --commit ,$(COMMIT))

.venv/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml README.md $(SOURCES) | .venv/bin/pip
	.venv/bin/pip install --quiet .
	touch $@

# With the versions that CI installed last where they are recorded for this Python, else within the bounds of pyproject.toml.
RECORDED = constraints/py$(shell .venv/bin/python -c 'import sys; print("%d%d" % sys.version_info[:2])').txt
.venv/dev.stamp: pyproject.toml $(wildcard constraints/*.txt) | .venv/bin/pip
	.venv/bin/pip install --quiet $(addprefix -c ,$(wildcard $(RECORDED))) -e '.[dev]'
	touch $@

# Records what is installed, for the next installs. A build's name (+cpu) is left out: another machine has another.
constraints: .venv/dev.stamp
	.venv/bin/pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]'
	{ echo '# What CI installed last. `make constraints` upgrades everything within the bounds of pyproject.toml and writes this.'; \
		.venv/bin/pip freeze --exclude-editable | sed -E '/ @ /d; s/\+.*//'; } > $(RECORDED)
	$(MAKE) --no-print-directory hashes

# What is installed: a CycloneDX bill of materials. Needs no network.
sbom: .venv/dev.stamp
	mkdir -p build
	.venv/bin/python -m tests.support.materials sbom > build/sbom.json

# The recorded versions with PyPI's own hashes, whatever other indexes this machine uses: for `pip install --require-hashes --no-deps -r`
# on a machine of the same kind (Linux, x86-64). Both targets download all of them, about 2 GB.
PYPI = PIP_CONFIG_FILE=/dev/null .venv/bin/pip --isolated
hashes: .venv/dev.stamp
	mkdir -p build
	$(PYPI) install --quiet --dry-run --ignore-installed --no-deps --report build/report.json -r $(RECORDED)
	{ echo '# What PyPI serves for $(RECORDED) (Linux, x86-64); `make hashes` writes this, `make verify-hashes` downloads and compares.'; \
		.venv/bin/python -m tests.support.materials hashes build/report.json; } > $(RECORDED:.txt=.hashes.txt)

verify-hashes: .venv/bin/pip
	$(PYPI) download --quiet --require-hashes --no-deps --dest build/wheels -r $(RECORDED:.txt=.hashes.txt)

# Known vulnerabilities of the recorded versions, where the network lets it; one that could not be looked up is an error.
audit: .venv/bin/pip
	@test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
		build/audit/bin/pip install --quiet pip-audit 2> build/audit/install.log; } || \
		{ echo 'audit: pip-audit cannot be installed (see build/audit/install.log); nothing was checked' >&2; exit 1; }
	build/audit/bin/pip-audit --strict --require-hashes --disable-pip -r $(RECORDED:.txt=.hashes.txt)

# The base image by its digest, as its registry names it today (needs docker and a network); no digest is typed.
IMAGE := python:3.12-slim
pins:
	@digest=$$(docker buildx imagetools inspect $(IMAGE) --format '{{.Manifest.Digest}}' 2> /dev/null) || \
		{ echo 'pins: no registry names $(IMAGE): docker and a network are needed; nothing was changed' >&2; exit 1; }; \
		sed -i -E "s|^FROM $(IMAGE)(@sha256:[0-9a-f]{64})?|FROM $(IMAGE)@$$digest|" Dockerfile
