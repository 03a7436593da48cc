# make train · make test · make lint · make bench: each sets up .venv when it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
LOWEST ?= .venv-lowest
BIN := $(VENV)/bin
# Options for train.py: make train ARGS="model=lstm_cell data=adding"
ARGS ?=
# Where MNIST lies.
DATA ?= data

.PHONY: help train test test-all test-lowest lint types docs format bench gpu gpu-tests gpu-sweep clean

help: ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: $(VENV)/.installed ## train: make train ARGS="model=lstm_cell data=adding"
	$(BIN)/python train.py $(ARGS)
	@echo
	@echo "next     source $(BIN)/activate"
	@echo "         python train.py model=mlp data.batch_size=512"
	@echo "         python train.py -m data.batch_size=64,128,256,512"

test: $(VENV)/.installed-test ## the default tests, about 2 minutes on two quiet cores
	$(BIN)/python -m pytest -n auto --maxprocesses=8 --dist worksteal $(ARGS)

test-all: export FUZZ_SECONDS ?= 1
test-all: $(VENV)/.installed-test ## the long ones too, one after the other
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-lowest: $(LOWEST)/.installed-test ## the default tests with the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest -n auto --maxprocesses=8 --dist loadfile $(ARGS)

lint: $(VENV)/.installed-test types docs ## ruff, spelling, types and docs: what CI checks before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files)

types: $(VENV)/.installed-test ## pyrefly over src/
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

docs: $(VENV)/.installed-test ## whether links, paths and commands in docs and docstrings are right
	$(BIN)/python docs/check.py

format: $(VENV)/.installed-test ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-test ## the benchmarks that take minutes; DATA=<folder> says where MNIST lies
	$(BIN)/python benchmarks/speed.py memory
	$(BIN)/python benchmarks/speed.py pipelines --root $(DATA)
	$(BIN)/python benchmarks/speed.py epoch --root $(DATA)
	$(BIN)/python benchmarks/speed.py start --root $(DATA)

# Each part for itself, so that a failure in one does not stop the others. BIN=<folder of a python> needs no network.
gpu: ## all that needs a GPU, 30 minutes on one; REHEARSE=1 tries it in small on the CPU
	$(MAKE) --keep-going gpu-tests gpu-sweep $(GPU_SCRIPTS:%=gpu-%)

gpu-%: export PYTHONUNBUFFERED := 1
gpu-%: $(if $(filter file,$(origin BIN)),$(VENV)/.installed-test)
	$(BIN)/python benchmarks/$*.py --root $(DATA) $(SMALL)

gpu-tests: $(if $(filter file,$(origin BIN)),$(VENV)/.installed-test)
	$(BIN)/python -m pytest -m gpu tests/gpu tests/data/test_loader.py

gpu-sweep: $(if $(filter file,$(origin BIN)),$(VENV)/.installed-test)
	$(BIN)/python train.py -m $(SWEEP) callbacks.progress=null

GPU_SCRIPTS := cuda_trace truth roofline causes recurrent monitoring choose
SWEEP = experiment=throughput model=cnn data.root=$(DATA)
ifdef REHEARSE
gpu gpu-%: export REHEARSE := 1
gpu gpu-%: export CUDA_VISIBLE_DEVICES :=
SMALL = --smallest
SWEEP += data=digits data.num_train=256 data.batch_size=8,32 callbacks.until_known.seconds=0.3
else
SMALL = --device cuda
SWEEP += trainer.accelerator=cpu,gpu data.batch_size=32,128,512,2048,8192
endif

clean: ## remove the environment and caches, never outputs/ or data/
	rm -rf $(VENV) $(LOWEST) build .pytest_cache .ruff_cache *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
	touch $(VENV)/.installed $@

$(LOWEST)/.installed-test: pyproject.toml .ci/lowest.py
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python .ci/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -c $(LOWEST)/constraints.txt
	touch $@
