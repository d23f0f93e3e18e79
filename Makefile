# Two commands need nothing but Python >= 3.11, git and make: `make demo` and `make test`.
# Set-up options (PYTHON=..., SETUP_TORCH=auto|system|pin) are described in scripts/setup.sh.

PY := .venv/bin/python
STAMP := .venv/.ready
# One test process a core; more than eight only wait for each other's imports.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN); [ $$n -le 8 ] && echo $$n || echo 8)

PYTEST = $(PY) -m pytest -n $(WORKERS) --dist worksteal
# Of the tests and of those of the kernels: a slow machine tests less of what is drawn, and CI=true tests everything.
MINUTES ?= 6 2.5
within = $(if $(filter true,$(CI)),,--minutes $(word $(1),$(MINUTES)))

.PHONY: setup demo test fuzz aot lint types docs package fmt clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@./scripts/setup.sh
	@touch $@

demo: $(STAMP)   ## train the small model; ARGS="--steps 50" passes options on
	$(PY) -m fuseops demo $(ARGS)

# The kernels run in Triton's interpreter, which is chosen when Triton is first imported: a process of its own. Exit
# code 5 is "no test selected", as ARGS="-k rules" does to one of the two.
test: $(STAMP)   ## ARGS="-k rules -x" passes options on
	$(PYTEST) $(call within,1) --ignore=tests/kernels $(ARGS) || [ $$? -eq 5 ]
	TRITON_INTERPRET=1 $(PYTEST) $(call within,2) tests/kernels $(ARGS) || [ $$? -eq 5 ]

# What a nightly needs: random programs, each of which is told by its seed and as a script where it fails.
N ?= 1000
fuzz: $(STAMP)   ## N=10000 programs; ARGS="--kind moe --seed 7 --minutes 30" passes options on
	$(PY) tests/fuzz --programs $(N) --jobs $(WORKERS) $(ARGS)

aot: $(STAMP)    ## compile the kernels that changed, for four architectures, without a GPU
	$(PY) -m fuseops kernels --rebuild --jobs $(WORKERS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

package: $(STAMP)   ## build wheel and sdist, look into them, and use the wheel outside of the repository
	$(PY) scripts/check_package.py

docs: $(STAMP)   ## build the site strictly, where `pip install -e ".[docs]"` was done
	$(PY) scripts/check_docs.py

fmt: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
