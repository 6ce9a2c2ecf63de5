"""Options of rlkv-study, and conditions that several processes measure."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.cache import CacheSettings
from rlkv.evaluation import study as module
from rlkv.evaluation.decoders import TransformersDecoder
from rlkv.evaluation.measurements import Condition
from rlkv.evaluation.published import published_name
from rlkv.evaluation.study import Study, StudyConfig, load_study, policy_templates, top_heads
from rlkv.gates.allocation import HeadAllocation
from rlkv.gates.head_gates import HeadGates
from rlkv.models.builtin import TINY_FOLDER
from rlkv.models.layout import Layout
from rlkv.utils import progress
from rlkv.utils.progress import progress_bar
from rlkv.utils.store import StoreInUseError
from tests.helpers.families import make_family
from tests.helpers.models import build_tokenizer
from tests.helpers.study_program import NUM_PROBLEMS, config_of, run

CACHE = CacheSettings(sink=4, window=16)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--analyses sweep speed", "'speed'"),
        ("--ablation --analyses ablations", "add --ablation"),
        ("--sparsities 0.4 1.5", "--sparsities 0.4 1.5"),
        ("--sparsities nan", "--sparsities nan"),
        ("--sizes 4+16 16", "--sizes '16'"),
        ("--sizes prompt+0", "--sizes 'prompt+0'"),
        ("--sizes 4000+8", "sink is 4000 and window is 8, but the model has 1024 positions"),
        ("--compare-at 0", "--compare-at 0"),
        ("--savings 1.0", "--savings 1"),
        ("--head-share 2.5", "--head-share is 2.5"),
        ("--batch-size 0", "--batch-size"),
        ("--max-new-tokens 5000", "the longest prompt of tiny has"),
        ("--top-heads 1.5", "--top-heads 1.5"),
        ("--top-heads 25", "--top-heads 25"),
        ("--top-heads 0", "--top-heads 0"),
        ("--gates x.pt", "--gates 'x.pt'"),
        ("--gates", "--gates needs"),
        ("--gates x=2x3.pt", "2 layers x 3 KV heads"),
        ("--ablation mine=x.pt", "--ablation: the name 'mine'"),
        ("--extra 2", "--extra is 2"),
        ("--repetition 5 6", "--repetition 5 6"),
        ("--tasks maths", "unknown task 'maths'"),
        ("--data absent.jsonl", "absent.jsonl"),
        ("--oracle absent.json", "--oracle absent.json"),
    ],
)
def test_bad_input_is_one_sentence(inputs: Path, tmp_path: Path, more: str, message: str) -> None:
    HeadGates(torch.rand(2, 3), deploy_sink=4, deploy_window=16).save(tmp_path / "2x3.pt")
    with pytest.raises(ValueError, match=re.escape(message)):
        run(inputs, tmp_path / "out", *more.replace("2x3", f"{tmp_path}/2x3").split())
    assert not (tmp_path / "out").exists()


def test_masks_of_drafts_may_be_wider_than_a_text(inputs: Path, tmp_path: Path) -> None:
    wide = config_of(inputs, tmp_path / "out", "--sizes", "4000+8", "--analyses", "acceptance")
    assert load_study(wide).config.sizes == ("4000+8",)


def test_gates_that_keep_other_sizes_are_refused(inputs: Path, tmp_path: Path) -> None:
    found = HeadGates.load(inputs / "a" / "gates.pt")
    replace(found, deploy_window=32).save(tmp_path / "wide.pt")
    gates = ("--gates", f"mine={inputs}/a/gates.pt", f"wide={tmp_path}/wide.pt")
    with pytest.raises(ValueError, match=r"different values of window .*wide\.pt 32.*--window"):
        run(inputs, tmp_path / "out", *gates)


def test_published_numbers_are_not_shown_next_to_problems_of_a_file(
    inputs: Path, tmp_path: Path
) -> None:
    published = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    model = tmp_path / "DeepSeek-R1-Distill-Llama-8B"
    model.symlink_to(TINY_FOLDER)
    given = replace(config_of(inputs, tmp_path), model=str(model))
    assert given.data is not None
    assert given.data.is_file()
    assert load_study(given).published is None
    assert published_name(str(model), None) == published_name(str(model), tmp_path) == published


def study_of(family: str, inputs: Path, folder: Path, *analyses: str) -> Study:
    """Load a study of random gates of a model of ``family``."""
    model = make_family(family, max_position_embeddings=512)
    model.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    heads = Layout.from_config(model.config).heads
    alpha = torch.tensor([[0.5] * count + [1.0] * (2 - count) for count in heads])
    HeadGates(alpha, heads=heads, sink=4, window=16).save(folder / "gates.pt")
    config = config_of(inputs, folder / "out", "--gates", f"mine={folder}/gates.pt")
    model_of = {"model": str(folder / "model"), "ablation": (), "oracle": None}
    return load_study(replace(config, **model_of, analyses=analyses))


def test_what_cannot_be_compressed_is_refused_at_once(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compute with the keys and values"):
        study_of("diffllama", inputs, tmp_path, "sweep")
    # learned sinks: policies that score attention do not serve them, and a sweep needs none
    with pytest.raises(ValueError, match="rkv scores tokens by their attention without learned"):
        study_of("gpt_oss", inputs, tmp_path, "budget")
    assert study_of("gpt_oss", inputs, tmp_path, "sweep").policies


def test_head_counts() -> None:
    assert top_heads((), 24) == (1, 2, 3, 4, 6, 8)
    assert top_heads((), 256) == (3, 5, 13, 26, 38, 51)
    assert top_heads((0.25, 3, 0.01), 24) == (1, 3, 6)


def config(**options) -> StudyConfig:
    return StudyConfig(gates=("a=b",), output_dir=Path("out"), **options)


@pytest.mark.parametrize(
    ("policies", "observation", "extra"),
    [(("rkv", "h2o"), None, 20), (("rkv", "rpc"), None, 32), (("rpc",), 4, 20)],
)
def test_what_policies_keep_always_fits(policies, observation, extra: int) -> None:
    given = config(policies=policies, observation=observation, prompt_variants=False)
    found, templates = policy_templates(given, CACHE)
    assert found == extra
    assert set(templates) == set(policies)


def test_policies_come_with_the_other_treatment_of_the_prompt() -> None:
    _, found = policy_templates(config(policies=("rkv", "random"), extra=20), CACHE)
    kept = {name: policy.protect_prompt for name, policy in found.items()}
    assert kept == {
        "rkv": False,
        "rkv (prompt kept)": True,
        "random": True,
        "random (prompt evictable)": False,
    }


def test_a_condition_in_use_is_left_for_later(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study(config_of(inputs, tmp_path))
    requests = []
    for number in range(3):
        full = torch.zeros(study.first.shape, dtype=torch.bool)
        full.view(-1)[:number] = True
        requests.append((f"number {number}", Condition("tiny", HeadAllocation(full))))
    order: list[int | str] = []

    def run_method(decoder: TransformersDecoder, *_: Any) -> list[dict[str, Any]]:
        number = decoder.allocation.num_full
        if number == 0 and order.count("wait") < 2:
            raise StoreInUseError("another process writes the rows")
        order.append(number)
        return []

    monkeypatch.setattr(module, "run_method", run_method)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: order.append("wait"))
    study.measure("t", requests)
    assert order == [1, 2, "wait", "wait", 0], "nothing waits while another condition is free"
    assert study.outcomes.keys() == {condition for _, condition in requests}


def test_rows_of_an_earlier_run_are_not_fast(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = load_study(config_of(inputs, tmp_path))
    now = 0.0
    paces = []

    def run_method(*given: Any) -> list[dict[str, Any]]:
        nonlocal now
        on_rows = given[-1]
        if not paces:
            on_rows(0, NUM_PROBLEMS, 0.0)
            now += 10
        on_rows(NUM_PROBLEMS, NUM_PROBLEMS, 1.0)  # of the second condition all are there already
        paces.append(bar.pace().partition(",")[0])
        return []

    monkeypatch.setattr(module, "run_method", run_method)
    allocations = study.first.allocations(0.5)[0], study.first.allocations(1.0)[0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress_bar("t", "problems", 2 * NUM_PROBLEMS) as bar:
        monkeypatch.setattr(module, "progress_bar", lambda *_: nullcontext(bar))
        study.measure("t", [("", Condition("tiny", allocation)) for allocation in allocations])
    assert paces == ["0.5 problems/s"] * 2
