"""The finder ``elimination`` from its options to the exported gates, and gates that are re-ranked
on solutions.
"""

from __future__ import annotations

import json
import pkgutil
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv import tiny
from rlkv.cli.train import main, parse_config
from rlkv.data.recall import MarkedText
from rlkv.gates.allocation import HeadAllocation, compression_order
from rlkv.gates.head_gates import HeadGates
from rlkv.tiny import draw_problem
from rlkv.training.elimination import (
    TraceLoss,
    draw_apart,
    draw_traces,
    eliminate_heads,
    rerank_on_traces,
    with_order,
)
from rlkv.training.run_folder import WandbLog
from rlkv.utils.files import read_log
from tests.helpers.models import make_tiny_model


@pytest.fixture
def curriculum(tmp_path: Path) -> Path:
    drawn = [draw_problem(random.Random(seed), 5) for seed in range(6)]
    rows = [{"problem": p.problem, "answer": p.answer, "output": p.solution} for p in drawn]
    path = tmp_path / "curriculum.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(path: Path, **other: object) -> list[str]:
    given = {"config": "tiny", "finder": "elimination", "curriculum": path, "use_cpu": "true"}
    given |= {
        "elimination_traces": 6,
        "elimination_sparsity": 0.25,
        "output_dir": path.parent / "run",
    }
    given |= {"elimination_distillation": 0, **other}
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def test_the_command_exports_an_order(curriculum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlkv-train", *options(curriculum, elimination_budget=2)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    folder = curriculum.parent / "run"
    gates = HeadGates.load(folder / "gates.pt")
    assert (
        gates == HeadGates.load(folder / "gates.safetensors") == HeadGates.load(folder / "adapter")
    )
    assert gates.alpha.flatten().sort().values.equal(torch.linspace(0, 1, 24))
    order = compression_order(gates)
    records = read_log(folder / "log.jsonl")
    assert [(r["layer"], r["head"]) for r in records] == order[:6]
    last = torch.tensor(read_log(folder / "gates.jsonl")[-1]["alpha"])
    assert torch.equal(last == 1, HeadAllocation.from_gates(gates, 0.25).full)
    assert order.index((1, 1)) > 12  # which the built-in model always needs
    assert records[-1]["traces/kept"] > 0.99
    assert (gates.sink, gates.window, gates.deploy_sink, gates.deploy_window) == (4, 16, 4, 16)
    told = gates.training
    assert (told["method"], told["finder"], told["high"], told["traces"]) == (
        "elimination",
        "elimination",
        0.25,
        6,
    )
    assert told["passes"] == records[-1]["passes"] <= 48
    assert sum(record["time/step_cpu_s"] for record in records) == pytest.approx(
        told["cpu_seconds"], rel=0.2
    )
    assert "curriculum" not in told
    assert {path.name for path in folder.glob("*.png")} == {
        "heat_map.png",
        "histogram.png",
        "training_curves.png",
    }


def test_a_run_that_was_stopped_goes_on(curriculum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = TraceLoss._measure, list[int]()

    def counted(loss: TraceLoss, number: int) -> float:
        measured.append(number)
        if len(measured) == 20:
            raise KeyboardInterrupt
        return measure(loss, number)

    monkeypatch.setattr(TraceLoss, "_measure", counted)
    again = options(curriculum, elimination_sparsity=0.2)
    with pytest.raises(KeyboardInterrupt):
        eliminate_heads(*parse_config(again))
    run = curriculum.parent / "run"
    assert not (run / "gates.pt").exists()
    stopped = eliminate_heads(*parse_config(again))
    whole = eliminate_heads(*parse_config([*again, "--output_dir", str(run.with_name("whole"))]))
    assert stopped.alpha.equal(whole.alpha)
    assert stopped.training["passes"] == whole.training["passes"]
    assert len(read_log(run / "log.jsonl")) == 5
    rows = (run / "measured.jsonl").read_text().splitlines()
    assert len(measured) == 2 * len(rows) + 1
    with pytest.raises(ValueError, match="forward_rows was 16 and is now 2"):
        eliminate_heads(*parse_config([*again, "--forward_rows", "2"]))
    with pytest.raises(ValueError, match="elimination_prefill 'full' -> 'local'"):
        eliminate_heads(*parse_config([*again, "--elimination_prefill", "local"]))


def test_a_finished_run_goes_on_to_another_sparsity(curriculum: Path) -> None:
    run = curriculum.parent / "run"
    eliminate_heads(*parse_config(options(curriculum, elimination_sparsity=0.1)))
    before = (run / "measured.jsonl").read_text()
    further = options(curriculum, elimination_sparsity=0.2)
    found = eliminate_heads(*parse_config(further))
    assert (run / "measured.jsonl").read_text().startswith(before)
    whole = eliminate_heads(*parse_config([*further, "--output_dir", str(run.with_name("whole"))]))
    assert found.alpha.equal(whole.alpha)
    assert len(read_log(run / "log.jsonl")) == 5


def test_distillation_orders_the_first_heads(
    curriculum: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same again after a kill in either part.

    The distilled gates say which heads go without being measured.
    """
    given = options(
        curriculum, elimination_distillation=8, elimination_sparsity=0.55, forward_rows=3
    )
    whole = eliminate_heads(*parse_config(given))
    run = curriculum.parent / "run"
    distilled, order = HeadGates.load(run / "distilled" / "gates.pt"), compression_order(whole)
    assert order[:10] == compression_order(distilled)[:10]
    assert [(r["layer"], r["head"]) for r in read_log(run / "log.jsonl")] == order[10:13]
    assert whole.alpha.flatten().sort().values.equal(torch.linspace(0, 1, 24))
    assert order.index((1, 1)) > 12
    steps = read_log(run / "distilled" / "log.jsonl")
    assert len(steps) == 8
    assert max(record["train/learning_rate"] for record in steps) == 0.25
    solutions = draw_traces(
        curriculum, tiny.load()[1], "rlkv", 6, seed=0
    )  # all of them in each step
    assert {record["tokens/answers"] for record in steps} == {
        sum(len(text.answers) for text in solutions)
    }
    told = whole.training
    assert (told["low"], told["high"], told["elimination_distillation"]) == (0.4, 0.55, 8)
    assert told["distillation_cpu_seconds"] == pytest.approx(
        sum(r["time/step_cpu_s"] for r in steps), abs=1e-3
    )
    total = sum(record["time/step_cpu_s"] for record in read_log(run / "log.jsonl"))
    assert total == pytest.approx(told["cpu_seconds"] + told["distillation_cpu_seconds"], rel=0.2)

    parts = {
        "rlkv.training.distillation.Distiller.train_step": 7,
        "rlkv.training.elimination.TraceLoss._measure": 5,
    }
    again = [*given, "--output_dir", str(run.with_name("again"))]
    for name, calls in parts.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, dies_at(name, calls))
            with pytest.raises(KeyboardInterrupt):
                eliminate_heads(*parse_config(again))
    assert eliminate_heads(*parse_config(again)).alpha.equal(whole.alpha)


def test_other_solutions_say_which_order_is_kept(
    curriculum: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(
        curriculum, elimination_distillation=8, elimination_sparsity=0.55, elimination_traces=2
    )
    asked: list[list[MarkedText]] = []

    def choose(
        model: Any, traces: list[MarkedText], distilled: HeadGates, measured: HeadGates, *_: Any
    ) -> HeadGates:
        asked.append(traces)
        measured.training |= {"order": "distilled", "choice_cpu_seconds": 0.0}
        return with_order(measured, compression_order(distilled))

    with monkeypatch.context() as patch:
        patch.setattr("rlkv.training.elimination.choose_order", choose)
        found = eliminate_heads(*parse_config(given))
    distilled = HeadGates.load(curriculum.parent / "run" / "distilled" / "gates.pt")
    assert compression_order(found) == compression_order(distilled)
    assert found.training["order"] == "distilled"
    measured, others = draw_apart(curriculum, tiny.load()[1], "rlkv", 2, seed=0)
    assert asked == [others]
    assert len({text.ids for text in [*measured, *others]}) == 6
    assert measured == draw_traces(curriculum, tiny.load()[1], "rlkv", 2, seed=0)
    told = eliminate_heads(*parse_config(given)).training
    assert told["order"] in told["order_losses"].keys() == {"measured", "mean", "distilled"}
    parts = told["choice_cpu_seconds"], told["cpu_seconds"], told["distillation_cpu_seconds"]
    assert min(parts) > 0
    total = sum(
        record["time/step_cpu_s"] for record in read_log(curriculum.parent / "run" / "log.jsonl")
    )
    assert total == pytest.approx(sum(parts), rel=0.2)


def test_options_of_the_distillation(curriculum: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts through the gates whatever the elimination does, activations recomputed.

    Unread options are named.
    """
    given = options(
        curriculum,
        elimination_distillation=8,
        elimination_sparsity=0.45,
        gradient_checkpointing="true",
    )
    settings, args = parse_config([*given, "--l1_beta", "0.3"])
    model, tokenizer = tiny.load()
    eliminate_heads(settings, args, model, tokenizer)
    noted = json.loads((curriculum.parent / "run" / "distilled" / "run_config.json").read_text())
    assert (noted["prefill"], noted["forward_rows"], noted["gradient_checkpointing"]) == (
        "local",
        1,
        True,
    )
    assert (noted["sink"], noted["window"], noted["loss"]) == (4, 16, "kl")
    assert not model.training
    assert not model.is_gradient_checkpointing
    unread = capsys.readouterr().out.partition("does not read ")[2]
    assert "l1_beta" in unread
    assert "max_steps" in unread  # of configs/tiny.yaml
    assert "elimination" not in unread


def test_wandb_gets_the_heads_that_go(curriculum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings, args = parse_config(options(curriculum, wandb="offline", elimination_sparsity=0.1))
    logged: list[dict[str, float]] = []
    begin = WandbLog.start

    def listen(log: WandbLog, name: str | None) -> None:
        begin(log, name)
        write = log.run.log
        monkeypatch.setattr(log.run, "log", lambda record: logged.append(record) or write(record))

    monkeypatch.setattr(WandbLog, "start", listen)
    eliminate_heads(settings, args)
    records = read_log(curriculum.parent / "run" / "log.jsonl")
    assert [record["elimination/traces_kept"] for record in logged] == [
        r["traces/kept"] for r in records
    ]
    assert list((curriculum.parent / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.parametrize("prefill", ["full", "local"])
def test_a_model_with_sliding_layers_is_refused_before_the_distillation(
    curriculum: Path, prefill: str
) -> None:
    _, tokenizer = tiny.load()
    layers = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    sliding = make_tiny_model("qwen2", vocab_size=len(tokenizer), **layers)
    given = options(
        curriculum,
        elimination_distillation=8,
        elimination_sparsity=0.5,
        elimination_prefill=prefill,
    )
    settings, args = parse_config(given)
    with pytest.raises(ValueError, match="no full attention"):
        eliminate_heads(settings, args, sliding, tokenizer)
    assert not any("rlkv_gate" in name for name, _ in sliding.named_modules())
    assert not (curriculum.parent / "run" / "distilled").exists()


def dies_at(name: str, calls: int) -> Any:
    """The function of this name until its call number ``calls``."""
    function, done = pkgutil.resolve_name(name), []

    def counted(*args: Any) -> Any:
        done.append(None)
        if len(done) == calls:
            raise KeyboardInterrupt
        return function(*args)

    return counted


def test_gates_are_the_start(curriculum: Path) -> None:
    """Head (1, 1) goes last (the ground truth of the built-in model), whatever the gates say of it."""
    model, tokenizer = tiny.load()
    implementation = model.config._attn_implementation
    alpha = torch.arange(24).view(4, 6) / 24
    alpha[1, 1], alpha[0, 2] = (
        0.98,
        0.99,
    )  # the gates would let it go before (0, 2), which nothing needs
    gates = HeadGates(
        alpha=alpha, sink=2, window=8, deploy_sink=4, deploy_window=16, training={"method": "hand"}
    )
    traces = draw_traces(curriculum, tokenizer, "rlkv", 6, seed=0)
    result = rerank_on_traces(model, traces, gates, 0.92, 1.0)
    assert compression_order(gates)[-2:] == [(1, 1), (0, 2)]
    assert compression_order(result) == [*compression_order(gates)[:-2], (0, 2), (1, 1)]
    facts = result.training["reranked"]
    assert (facts["low"], facts["high"], facts["traces"]) == (0.92, 1.0, 6)
    assert facts["passes"] > 2
    assert facts["cpu_seconds"] > 0
    assert result.training["method"] == "hand"
    assert gates.training == {"method": "hand"}
    assert model.config._attn_implementation == implementation
    assert not any("rlkv_gate" in name for name, _ in model.named_modules())


def test_traces_are_drawn_with_the_seed(curriculum: Path) -> None:
    _, tokenizer = tiny.load()
    first, again, other = (
        draw_traces(curriculum, tokenizer, "rlkv", 4, seed) for seed in (0, 0, 1)
    )
    assert first == again != other
    with pytest.raises(ValueError, match=r"7.*has only 6"):
        draw_traces(curriculum, tokenizer, "rlkv", 7, seed=0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"elimination_sparsity": 0.01}, "0.01"),
        ({"elimination_sparsity": 0.41, "elimination_distillation": 8}, "further apart"),
        ({"elimination_sparsity": 1.5, "elimination_distillation": 8}, "1.5"),
        ({"elimination_traces": 7}, "only 6"),
        ({"curriculum": "x.jsonl"}, "x"),
    ],
)
def test_what_does_not_fit_is_named(
    changed: dict[str, object], named: str, curriculum: Path
) -> None:
    settings = parse_config(options(curriculum, **changed))
    with pytest.raises(ValueError, match=named):
        eliminate_heads(*settings)
    assert not (curriculum.parent / "run").exists()


def test_it_needs_solutions_and_fitting_gates(curriculum: Path) -> None:
    settings, args = parse_config(
        ["--config", "tiny", "--finder", "elimination", "--use_cpu", "true"]
    )
    with pytest.raises(ValueError, match="--curriculum"):
        eliminate_heads(settings, args)
    with pytest.raises(ValueError, match="4 layers x 6"):
        rerank_on_traces(make_tiny_model("llama"), [], HeadGates(torch.rand(4, 6)), 0.0, 0.5)
