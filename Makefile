# The only commands anyone needs; CI calls them.
PYTHON ?= python3
BIN := .venv/bin

# Of the hundreds of processes that tests start, each compiles a second of Python where no bytecode is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow check gpu-test bench serve golden wheels lock clean

demo: .venv/ready  ## train, prune, tune and run a small network on kernels
	$(BIN)/python examples/digits.py

test: .venv/ready  ## what needs no GPU and is quick: each behaviour, at the lowest level that shows it
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not slow"

test-slow: .venv/ready  ## what needs no GPU, and seconds each: chaos, kills, Ray, browsers, large files, fuzzing, fits
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not gpu"

check: .venv/ready  ## formatting, lint, types, and the one way of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gpu-test: .venv/ready  ## the tests that run kernels on an NVIDIA GPU
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make gpu-test: no NVIDIA GPU on this machine" >&2; exit 2; }
	$(BIN)/python -m pytest -m gpu

bench: .venv/ready  ## seven kernels timed beside cuSPARSE and cuBLAS on this machine's GPU
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make bench: no NVIDIA GPU on this machine" >&2; exit 2; }
	$(BIN)/python -m benchmarks.kernels --set seven --shortlist 40

serve: .venv/ready  ## the REST service on http://127.0.0.1:8000
	$(BIN)/lospmm serve

golden: .venv/ready  ## write the golden texts anew; review them as a diff
	$(BIN)/python -m tests.golden.renew

wheels: .venv/ready  ## dist/: the package, and lospmm-torch where PyTorch and g++ are in .venv
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .
	if $(BIN)/python -c "import torch" 2>/dev/null; then \
		$(BIN)/python -m build --wheel --no-isolation --outdir dist native; fi
	$(BIN)/python -m twine check --strict dist/*

lock:  ## pin every dependency anew (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --group dev --extra postgresql --extra ray \
		--no-emit-package lospmm --generate-hashes --no-header --output-file requirements.lock pyproject.toml

.venv/ready: pyproject.toml requirements.lock
	@echo "Installing into .venv: 1.2 GB, about a minute" >&2
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf .venv build dist
