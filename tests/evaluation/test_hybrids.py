"""Evaluations and studies of hybrids: sparsity and bytes of heads with gates, and of the model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rlkv import tiny
from rlkv.cli.app import parse
from rlkv.evaluation.analyses import run_study
from rlkv.evaluation.eval_report import write_report
from rlkv.evaluation.evaluate import EvalConfig, evaluate
from rlkv.evaluation.runner import render_problems
from rlkv.evaluation.study import StudyConfig
from rlkv.gates.head_gates import HeadGates
from rlkv.models.layout import Layout
from rlkv.models.loading import load_model
from rlkv.models.shape import ModelShape
from tests.helpers.equalities import tensors
from tests.helpers.families import make_family
from tests.helpers.infer import infer

TOKENS = 24
# the allocation belongs to the model: none is fitted
pytestmark = pytest.mark.filterwarnings("error:.*have no full attention")


@pytest.fixture(scope="module", params=["gemma3_text", "qwen3_5_text", "gemma4_text"])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, gates of two methods, and three problems."""
    folder = tmp_path_factory.mktemp(request.param)
    _, tokenizer = tiny.load()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    if request.param == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = len(tokenizer)
    model = make_family(request.param, **sizes)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    heads = Layout.from_config(model.config).heads
    torch.manual_seed(0)
    for name in ("a", "b"):
        alpha = torch.ones(len(heads), max(heads))
        for layer, number in enumerate(heads):
            alpha[layer, :number] = torch.rand(number)
        shape = ModelShape.from_config(model.config, "tiny")
        gates = HeadGates(alpha, model=shape, heads=heads, deploy_sink=2, deploy_window=6)
        gates.save(folder / f"{name}.pt")
    problems = tiny.problems(3, seed=3, min_definitions=3, max_definitions=3)
    lines = [json.dumps(problem) + "\n" for problem in problems]
    (folder / "problems.jsonl").write_text("".join(lines))
    return folder


def options(inputs: Path, output: Path) -> list[str]:
    words = f"--model {inputs}/model --data {inputs}/problems.jsonl --output-dir {output}"
    return [*words.split(), "--max-new-tokens", str(TOKENS), "--device", "cpu"]


def held(model: PreTrainedModel, ids: list[int], layers: list[int]) -> int:
    """Count the bytes of all tensors of the stock cache in these layers after a text."""
    with torch.no_grad():
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    found = [vars(layer) for number, layer in enumerate(cache.layers) if number in layers]
    return sum(tensor.nbytes for tensor in tensors(found))


def test_an_evaluation(inputs: Path, tmp_path: Path) -> None:
    names = ("full", "a@0.5", "random-heads@0.5", "tova@12")
    words = [*options(inputs, tmp_path), "--gates", f"a={inputs}/a.pt", "--methods", *names]
    config = parse(EvalConfig, arguments=words)
    done = evaluate(config)
    assert done is not None
    write_report(tmp_path, done)
    model, tokenizer = load_model(f"{inputs}/model", "float32", "cpu")
    layout = Layout.from_config(model.config)
    gated = layout.gated
    others = sorted(set(range(len(layout.layers))) - set(gated))
    ((task, problems),) = config.problems(template=None)
    prompts = {of.key: of.prompt_ids for of in render_problems(task, problems, tokenizer)}
    for method in names:
        rows = done.rows["tiny", method]
        for row in rows:
            text = [*prompts[row["key"]], *row["token_ids"][:-1]]
            unchanged = held(model, text, others)
            of_gated = held(model, text, gated)
            assert row["kv_bytes_unchanged"] == unchanged > 0
            assert row["kv_bytes_full"] == unchanged + of_gated
            if method == "full":
                assert row["kv_bytes"] == row["kv_bytes_full"]
            elif method != "tova@12":  # half of the heads keep 8 tokens
                kept = of_gated // 2 + of_gated // 2 * 8 // len(text)
                assert row["kv_bytes"] == unchanged + kept
            else:  # 4 bytes of score for each entry
                assert unchanged < row["kv_bytes"] < unchanged + of_gated
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    for summary in results:
        parts = (summary["kv_bytes"], summary["kv_bytes_full"])
        gated_share = (parts[0] - summary["kv_bytes_unchanged"]) / (
            parts[1] - summary["kv_bytes_unchanged"]
        )
        if summary["method"] != "full":
            cell = f"KV {parts[0] / parts[1]:.0%} ({gated_share:.0%})"
            assert cell in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("inputs", ["qwen3_5_text"], indirect=True)
def test_a_study(inputs: Path, tmp_path: Path) -> None:
    words = f"""--gates a={inputs}/a.pt b={inputs}/b.pt --ablation c={inputs}/b.pt
        --random-draws 2 --sparsities 0.5 --compare-at 0.5 --top-heads 1
        --repetition 20 5 --policies rkv --savings 0.3 --buffer 4 --observation 2 --extra 8
        --sizes 2+4 --batch-size 5"""
    words = [*options(inputs, tmp_path), *words.split()]
    run_study(parse(StudyConfig, arguments=words))
    content = json.loads((tmp_path / "results.json").read_text())
    model, _ = load_model(f"{inputs}/model", "float32", "cpu")
    heads = torch.tensor(Layout.from_config(model.config).heads)
    gated = torch.arange(int(heads.max())) < heads[:, None]
    total = int(heads.sum())
    for condition in content["conditions"]:
        full = torch.tensor(condition["full_heads"], dtype=torch.bool)
        assert full[~gated].all()
        share = condition["kv_share_gated"]
        if full.all():
            assert share == condition["kv_share"] == 1
        else:
            assert share < condition["kv_share"] < 1
        if any("random" in request for request in condition["requested_as"]):
            assert int((~full).sum()) in (total // 2, 1)
    analyses = content["analyses"]
    of_gates = analyses["gates"]["methods"]["a"][0]
    assert of_gates["heads"] == total
    alpha = HeadGates.load(inputs / "a.pt").alpha[gated]
    assert of_gates["mean"] == pytest.approx(alpha.mean().item())
    shared = of_gates["overlap_with_first"]
    assert shared == [{"sparsity": 0.5, "share": 1.0}]
    table = (tmp_path / "table.md").read_text()
    assert "| the same, layers with gates | 100% |" in table
    assert "of the bytes of layers with gates" in table
    assert (tmp_path / "heat-maps.png").exists()


def test_what_rlkv_infer_says(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", inputs / "model", "--prompt", "a = 3, a?", "--max-new-tokens", "40"]
    infer("--gates", inputs / "a.pt", "--sparsity", "0.5", *common, "--compare-full")
    said = capsys.readouterr().err
    assert "% in the layers with gates), heads: " in said
    compressed, full = (line for line in said.splitlines() if "bytes the full cache" in line)
    assert "(100.0%), " in full
    found = re.search(r": ([\d,]+) / ([\d,]+) \(([\d.]+)%; ([\d.]+)% in", compressed)
    assert found is not None
    held, whole = (int(number.replace(",", "")) for number in found.groups()[:2])
    share, gated = map(float, found.groups()[2:])
    assert share == pytest.approx(100 * held / whole, abs=0.05)
    assert gated < share < 100
