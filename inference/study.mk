# The stages of `make demo`, `make smol`, `make study` and `make llm`, each one of the project's own programs. A stage has
# ended when its last file is there, and runs again when a file that it needs is newer; a program that was stopped resumes
# by itself.
#   make -f inference/study.mk demo MODEL=tiny OUT=results/demo               # filter, find gates, compare
#   make -f inference/study.mk study MODEL=smol OUT=results/study_smol -j2    # find heads in every way, with seeds
#   make -f inference/study.mk llm MODEL=qwen_coder OUT=results/llm           # on a capable model; needs vLLM
# RLKV is configs/MODEL.yaml with fewer steps. The tiny model has the ablations of RLKV's paper too (arXiv 2510.08525,
# figure 8: without adaptive weighting, without self-distilled data, the penalty times 0.2 and 5).
PYTHON ?= python
MODEL ?= tiny
OUT ?= results/demo
# QUICK=1: everything at about a tenth of the size
size = $(if $(filter 1,$(QUICK)),$(2),$(1))
first = $(wordlist 1,$(1),0 1 2 3 4 5)

SEEDS := $(call first,$(call size,3,2))
DISTILL_SEEDS := $(SEEDS)
GRPO_STEPS := $(call size,40,5)
FIRST_STEPS := $(call size,40,8)
study: HELD_OUT := $(call size,200,20)
study: DRAWS := $(call size,10,2)
ifeq ($(MODEL),tiny)
VARIANT_SEEDS := $(call first,$(call size,2,1))
CHAINS := 3-12
ORACLE := --oracle rlkv/tiny/model/ground_truth.json
FINDER := train/grpo_gates.py --config configs/tiny.yaml --max-steps $(call size,100,4)
FOUND := RLKV
DTYPE := float32
SAVE_STEPS := 10
DISTILL_STEPS := $(call size,120,12)
# solutions that heads are eliminated on, after a distillation, and up to which sparsity
TRACES := $(call size,32,10)
FEW_TRACES := $(call size,32,8)
ELIMINATED := 0.8
study demo: FILTERED := $(call size,400,60)
study: SPARSITIES := $(call size,0.2 0.4 0.5 0.6 0.8,0.4 0.6)
demo: SPARSITIES := $(call size,0.2 0.4 0.5 0.6 0.8,0.5)
demo: HELD_OUT := $(call size,100,20)
demo: DRAWS := $(call size,5,2)
else ifeq ($(MODEL),qwen_coder)
FILTERED := $(call size,112,16)
DISTILL_STEPS := $(call size,20,2)
HELD_OUT := $(call size,40,4)
TRACES := $(call size,24,4)
# its last part names the model in files
LLM := $(OUT)/Qwen2.5-Coder-1.5B-Instruct
NAMED := --model $(LLM)
DRAWN := --limit $(FILTERED) $(NAMED) $(LLM_DATA:%=--input %/deepscaler_math.jsonl)
# memory for one stage at a time
.NOTPARALLEL:
else
SEEDS := $(call first,2)
CHAINS := 4-10
FINDER := train/distill_gates.py --config configs/distill_smol_traces.yaml --steps $(call size,40,4)
FOUND := traces
DTYPE := fast
SAVE_STEPS := 2
DISTILL_STEPS := $(call size,40,4)
TRACES := $(call size,8,2)
FEW_TRACES := $(call size,16,2)
ELIMINATED := 0.7
study: FILTERED := $(call size,240,24)
# a study that is stopped has measured the first of them
study: SPARSITIES := $(call size,0.5 0.6 0.4 0.7 0.2 0.8 0.3,0.4 0.6)
demo: FILTERED := $(call size,160,24)
demo: SPARSITIES := $(call size,0.5 0.7,0.5)
demo: HELD_OUT := $(call size,100,10)
demo: DRAWS := $(call size,2,1)
endif

# a folder never mixes results of different settings, configs or versions
STATE := $(shell { echo $(MAKECMDGOALS) $(MODEL) $(filter 1,$(QUICK)) \
	$(if $(filter llm,$(MAKECMDGOALS)),'$(LLM_DATA)'); grep ^version pyproject.toml; \
	cat inference/study.mk configs/*$(MODEL)*.yaml; } | cksum)
ifneq ($(wildcard $(OUT)/*),)
ifneq ($(STATE),$(shell cat $(OUT)/started 2> /dev/null))
$(error $(OUT) was not started with these settings, configs and version: run it with FRESH=1, or move it away)
endif
endif

# a program with its options; what it prints goes to a log, whose end is shown if it fails. It ends with make.
LOG = $(OUT)/logs/$(subst /,_,$(basename $(@:$(OUT)/%=%))).log
define run
@echo 'python $(1)'
@trap 'kill $$!' INT TERM; $(PYTHON) $(1) > $(LOG) 2>&1 & wait $$! || { tail -n 5 $(LOG) >&2; echo "all of it: $(LOG)" >&2; exit 1; }
@test -s $@ && { touch $@ 2> /dev/null || true; } # the file may be another user's, behind a link
endef

CURRICULUM := $(OUT)/curriculum/report.md
PROBLEMS := $(OUT)/problems.jsonl
RAW := $(OUT)/unfiltered.jsonl
DRAWN ?= --num-problems $(FILTERED)
POOL = --config configs/filter_$(MODEL).yaml $(DRAWN)
STUDY = inference/study.py --config configs/study_$(MODEL).yaml --data $(PROBLEMS) --random-draws $(DRAWS) \
	--sparsities $(SPARSITIES) $(ORACLE)

.PHONY: demo study llm
demo: $(OUT)/study/report.html
	@cp $(OUT)/study/sweep-$(MODEL).png $(OUT)/accuracy.png
	@cp $(addprefix $(OUT)/study/,results.json table.md) $(OUT)
	@cp $(addprefix $(OUT)/training/,gates.pt gates.safetensors heat_map.png training_curves.png) $(OUT)
	@cat $(OUT)/table.md
	@echo "next: rlkv-infer --gates $(OUT)/gates.pt --sparsity 0.5"

$(OUT)/started:
	@mkdir -p $(OUT)/logs
	@echo '$(STATE)' > $@

$(CURRICULUM): | $(OUT)/started
	$(call run,data_prep/filter_deepscaler.py $(POOL) --output-dir $(@D))

$(PROBLEMS): | $(OUT)/started
	$(call run,data_prep/draw_problems.py --overwrite --model $(MODEL) --num-problems $(HELD_OUT) --steps $(CHAINS) \
		--seed 2000003 --output $@)

$(OUT)/training/gates.pt: $(CURRICULUM)
	$(call run,$(FINDER) --curriculum $(OUT)/curriculum/curriculum.parquet --output-dir $(@D))

$(OUT)/study/report.html: $(OUT)/training/gates.pt $(PROBLEMS)
	$(call run,$(STUDY) --gates $(FOUND)=$< --analyses sweep gates --output-dir $(@D))

# the study: METHOD_SEED/gates.pt for every method and seed
given = $(foreach seed,$(4),"$(1)=$(OUT)/runs/$(2)_$(seed)/$(3)")
GATES := $(call given,RLKV,rlkv,gates.pt,$(SEEDS)) \
	$(call given,RLKV re-ranked,rlkv,reranked.safetensors,$(SEEDS)) \
	$(call given,elimination,elimination,gates.pt,$(SEEDS)) \
	$(call given,distilled elimination,distilled_elimination,gates.pt,$(SEEDS)) \
	$(call given,traces,traces,gates.pt,$(DISTILL_SEEDS)) \
	$(call given,traces re-ranked,traces,reranked.safetensors,$(SEEDS)) \
	$(call given,DuoAttention,duoattention,gates.pt,$(DISTILL_SEEDS))
ABLATIONS := $(call given,no self-distilled data,no_self-distilled_data,gates.pt,$(VARIANT_SEEDS)) \
	$(call given,no adaptive weight,no_adaptive_weight,gates.pt,$(VARIANT_SEEDS)) \
	$(call given,beta x 0.2,beta_x_0.2,gates.pt,$(VARIANT_SEEDS)) \
	$(call given,beta x 5,beta_x_5,gates.pt,$(VARIANT_SEEDS))
FILES := $(filter $(OUT)/%,$(subst =, ,$(subst ",,$(GATES) $(ABLATIONS))))
COMPARE = $(STUDY) --gates $(GATES) $(if $(VARIANT_SEEDS),--ablation $(ABLATIONS)) --output-dir $(@D)
FROM_CURRICULUM = $(NAMED) --curriculum $(OUT)/curriculum/curriculum.parquet --seed $* --output-dir $(@D)
DISTILL = train/distill_gates.py --steps $(DISTILL_STEPS) --config configs/distill_$(MODEL)
GRPO = train/grpo_gates.py --config configs/$(MODEL).yaml
RLKV = $(GRPO) --max-steps $(GRPO_STEPS) --save-steps $(SAVE_STEPS)

# one thread a stage, so that CPU seconds of stages that run at once can be compared
study: export OMP_NUM_THREADS := 1
study: $(OUT)/report/measured.json $(OUT)/report/report.html
	@cp $(OUT)/report/report.* $(OUT)/report/table.md $(OUT)/report/results.json $(OUT)/report/*.png $(OUT)
	@mkdir -p $(OUT)/gates
	@for run in $(OUT)/runs/*; do cp $$run/gates.safetensors $(OUT)/gates/$${run##*/}.safetensors; done
	@for run in $(wildcard $(OUT)/runs/rlkv_*) $(wildcard $(OUT)/runs/traces_*); do \
		test ! -e $$run/reranked.safetensors || cp $$run/reranked.safetensors $(OUT)/gates/$${run##*/}_reranked.safetensors; done
	@cat $(OUT)/table.md
	@echo "next: open $(OUT)/report.html"

# two processes of the same study share its conditions
$(OUT)/report/measured.json: $(PROBLEMS) $(FILES)
	$(call run,$(COMPARE) --measure-only)
$(OUT)/report/report.html: $(PROBLEMS) $(FILES)
	$(call run,$(COMPARE))

$(RAW): $(CURRICULUM)
	$(call run,data_prep/draw_problems.py --overwrite $(POOL) --as-many-as $(OUT)/curriculum/curriculum.parquet --output $@)

$(OUT)/runs/traces_%/gates.pt: $(CURRICULUM)
	$(call run,$(DISTILL)_traces.yaml $(FROM_CURRICULUM))
$(OUT)/runs/duoattention_%/gates.pt: | $(OUT)/started
	$(call run,$(DISTILL).yaml --seed $* --output-dir $(@D))
$(OUT)/runs/elimination_%/gates.pt: $(CURRICULUM)
	$(call run,$(GRPO) --finder elimination --elimination-distillation 0 --elimination-sparsity 0.8 \
		--elimination-traces $(TRACES) $(FROM_CURRICULUM))
$(OUT)/runs/distilled_elimination_%/gates.pt: $(CURRICULUM)
	$(call run,$(GRPO) --finder elimination --elimination-distillation $(FIRST_STEPS) \
		--elimination-sparsity $(ELIMINATED) --elimination-traces $(FEW_TRACES) $(FROM_CURRICULUM))
$(OUT)/runs/rlkv_%/gates.pt: $(CURRICULUM)
	$(call run,$(RLKV) $(FROM_CURRICULUM))
$(OUT)/runs/no_self-distilled_data_%/gates.pt: $(RAW)
	$(call run,$(RLKV) --curriculum $(RAW) --seed $* --output-dir $(@D))
$(OUT)/runs/no_adaptive_weight_%/gates.pt: $(CURRICULUM)
	$(call run,$(RLKV) --no-adaptive $(FROM_CURRICULUM))
# l1_beta is 0.02 in configs/tiny.yaml
$(OUT)/runs/beta_x_0.2_%/gates.pt: $(CURRICULUM)
	$(call run,$(RLKV) --l1-beta 0.004 $(FROM_CURRICULUM))
$(OUT)/runs/beta_x_5_%/gates.pt: $(CURRICULUM)
	$(call run,$(RLKV) --l1-beta 0.1 $(FROM_CURRICULUM))
$(OUT)/runs/%/reranked.safetensors: $(OUT)/runs/%/gates.pt
	$(call run,inference/rerank_heads.py --overwrite --curriculum $(OUT)/curriculum/curriculum.parquet --dtype $(DTYPE) \
		--num-traces $(TRACES) --seed $(lastword $(subst _, ,$*)) --gates $< --output $@)

# a capable model: heads by distillation and by attention, compared with random ones and with eviction policies
# Minutes on two cores, as far as measured: folder of a GGUF file 1, curriculum of 160 problems 12.5, distillation of 24
# steps 25 (10 GB). On one busy core: a solution for attention 0.1, the start of a vLLM engine, of which each method has
# one, 2 (9 GB).
BY_TRACES := $(OUT)/runs/traces_0/gates.pt
BY_ATTENTION := $(OUT)/runs/attention_0/gates.pt
EVALUATE = inference/evaluate.py --config configs/eval_$(MODEL).yaml $(NAMED) --limit $(HELD_OUT) $(LLM_DATA:%=--data %) \
	--gates traces=$(BY_TRACES) attention=$(BY_ATTENTION)
HEADS := full traces@0.4 traces@0.6 attention@0.4 attention@0.6 random-heads@0.4
# The plugin does not protect prompts from policies. Computed for a prompt of 104 and a text of 260 tokens, policies hold
# 0.67 of the full cache's bytes, heads at 0.4 0.69, both together 0.82.
POLICIES := full traces@0.4+rkv@64:buffer=16:protect_prompt=true rkv@112:buffer=16:protect_prompt=true \
	snapkv@112:buffer=16:protect_prompt=true

ifeq ($(MODEL),qwen_coder)
llm: $(OUT)/evaluation/report.html $(OUT)/eviction/report.html
	@cat $(<D)/report.md $(OUT)/eviction/report.md

$(LLM)/config.json: | $(OUT)/started
	$(call run,data_prep/fetch_llm.py $(LLM_GGUF:%=--gguf %) $(LLM_DATA:%=--data %) --output $(@D))
$(CURRICULUM): | $(LLM)/config.json
$(OUT)/runs/attention_%/gates.pt: $(CURRICULUM)
	$(call run,train/grpo_gates.py --finder attention --dtype fast --sink 16 --window 64 --elimination-traces $(TRACES) \
		$(FROM_CURRICULUM))
$(OUT)/evaluation/report.html: $(BY_TRACES) $(BY_ATTENTION)
	$(call run,$(EVALUATE) --output-dir $(@D) --methods $(HEADS))
$(OUT)/eviction/report.html: $(BY_TRACES) $(BY_ATTENTION)
	$(call run,$(EVALUATE) --engine hf --output-dir $(@D) --methods $(POLICIES))
endif
