"""Adapters of modules other than attention, over head reallocation."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from tests.helpers.engines import check_equal, engine, make_served, need_vllm, random_prompts

need_vllm()

MODULES = ["gate_proj", "up_proj", "down_proj"]


def test_adapter_of_the_feed_forward_layers(tmp_path: Path) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    served = make_served(tmp_path, "llama")
    adapted = get_peft_model(
        deepcopy(served.model), LoraConfig(r=8, target_modules=MODULES, init_lora_weights=False)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.mul_(3)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = replace(served, model=adapted.merge_and_unload())
    options = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": MODULES}
    params = SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, detokenize=False, logprobs=1
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in random_prompts((5, 80, 200, 333))]
    with engine(served, served.request(0.5), **options) as llm:
        adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        own = llm.generate(inputs, params, use_tqdm=False, lora_request=adapter)
        plain = llm.generate(inputs, params, use_tqdm=False)
    assert check_equal(merged, 0.5, own) == 240
    assert check_equal(served, 0.5, plain) == 240
    assert [o.outputs[0].token_ids for o in own] != [o.outputs[0].token_ids for o in plain]
