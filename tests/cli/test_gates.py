"""rlkv-gates: inspect, convert, plot, diff."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from rlkv.cli.gates import main
from rlkv.gates.head_gates import HeadGates
from rlkv.models.shape import ModelShape
from tests.helpers.programs import exit_code
from tests.helpers.run_logs import write_steps


@pytest.fixture
def gates_file(tmp_path: Path) -> Path:
    alpha = torch.tensor([[0.0, 1.0, 0.25, 0.5], [0.75, 0.0, 0.05, 1.0], [0.9, 0.8, 0.7, 0.6]])
    model = ModelShape("owner/model", "llama", 3, 4, 8, 32)
    path = tmp_path / "gates.pt"
    HeadGates(alpha, model=model).save(path)
    return path


run = partial(exit_code, main, "rlkv-gates")


@pytest.mark.parametrize("name", ["mine.pt", "mine.tsv", "mine.png", "folder"])
def test_what_exists_is_replaced_only_if_asked_for(
    gates_file: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = gates_file.parent / name
    mine = out / "adapter_model.safetensors" if name == "folder" else out
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    command = "plot" if name.endswith(".png") else "convert"
    assert run(command, gates_file, out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert mine.read_text() == "mine"
    assert run(command, gates_file, out, "--overwrite") == 0
    assert mine.read_bytes() != b"mine"


def test_what_exists_below_the_home_folder_is_not_replaced(
    gates_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(gates_file.parent))
    mine = gates_file.parent / "mine.pt"
    mine.write_text("mine")
    assert run("convert", gates_file, "~/mine.pt") == 2
    assert mine.read_text() == "mine"


def test_plot(gates_file: Path) -> None:
    heat_map, histogram = gates_file.with_name("map.png"), gates_file.with_name("histogram.png")
    assert run("plot", gates_file, heat_map) == 0
    assert run("plot", gates_file, histogram, "--histogram") == 0
    assert heat_map.read_bytes().startswith(b"\x89PNG")
    assert heat_map.read_bytes() != histogram.read_bytes()


@pytest.mark.parametrize("package", ["trl", "peft"])
def test_a_report_without_the_extra_is_one_sentence(
    package: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert run("report", tmp_path) == 2
    assert f"needs the package {package}" in capsys.readouterr().err


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 1, 2, total=3)
    assert run("report", tmp_path) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "report.html")]
    assert "Step 2 of 3" in (tmp_path / "report.html").read_text()
    assert run("report", tmp_path, "--out", tmp_path / "pages" / "mine.html") == 0
    assert (tmp_path / "pages" / "mine.html").exists()
    (tmp_path / "report.html").write_text("<b>mine</b>")
    assert run("report", tmp_path) == 2
    assert "is no page that rlkv wrote" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "<b>mine</b>"


def test_diff(gates_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", gates_file, gates_file) == 0
    same = capsys.readouterr().out
    assert "Spearman correlation  1.0000" in same
    assert "sparsity 0.5: 1.000  (6 of 6)" in same
    assert "largest changes" not in same
    changed = HeadGates.load(gates_file)
    changed.alpha[1, 3] = 0.0
    changed.alpha[0, 0] = 0.3
    changed.save(gates_file.with_name("changed.pt"))
    assert run("diff", gates_file, gates_file.with_name("changed.pt"), "--changes", 5) == 0
    out = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(out) if line.startswith("largest changes"))
    assert [line.split() for line in out[start + 1 :]] == [
        ["1", "3", "1.000", "0.000", "-1.000"],
        ["0", "0", "0.000", "0.300", "+0.300"],
    ]
    assert any("sparsity 0.5: 0.833  (5 of 6)" in line for line in out)


def test_diff_names_two_models(gates_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gates = HeadGates.load(gates_file)
    for name in ("one", "two"):
        shape = ModelShape(name, "llama", *gates.alpha.shape, 8, 16)
        replace(gates, model=shape).save(gates_file.with_name(f"{name}.pt"))
    assert run("diff", gates_file.with_name("one.pt"), gates_file.with_name("two.pt")) == 0
    assert "of two models: one, two" in capsys.readouterr().out
    # another file may state less of the same model
    replace(gates, model=ModelShape("one", "", *gates.alpha.shape, 0, 0)).save(gates_file)
    assert run("diff", gates_file.with_name("one.pt"), gates_file) == 0
    assert "of two models" not in capsys.readouterr().out


def test_a_folder_whose_name_has_a_dot(gates_file: Path) -> None:
    folder = gates_file.with_name("Qwen2.5")
    assert run("convert", gates_file, f"{folder}/") == 0
    assert torch.equal(HeadGates.load(folder).alpha, HeadGates.load(gates_file).alpha)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "absent.pt"), "error: absent.pt: no such file or folder"),
        (("inspect", "gates.pt", "--sparsities", "1.5"), "error: sparsity 1.5 is not in [0, 1]"),
        (("inspect", "gates.pt", "--scope", "head"), "scope 'head'"),
        (("look", "gates.pt"), "error: there is no command 'look'"),
        (("diff", "gates.pt", "gates.pt", "--changes", "-1"), "error: --changes"),
        (("convert", "gates.pt", "out.bin"), "error: out.bin: unknown gates format '.bin'"),
        (("plot", "gates.pt", "out.txt"), "error: out.txt: no figure format 'txt'"),
        (("diff", "gates.pt", "other.pt"), "they belong to different models"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    gates_file: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(gates_file.parent)
    HeadGates(torch.rand(2, 2)).save("other.pt")
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {p.name for p in gates_file.parent.iterdir()} == {"gates.pt", "other.pt"}


def test_constant_gates_have_no_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, gates in (("a.pt", torch.rand(2, 2)), ("b.pt", torch.ones(2, 2))):
        HeadGates(gates).save(tmp_path / name)
    assert run("diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")) == 0
    shown = capsys.readouterr()
    assert "not defined, since all gates of B are 1\n" in shown.out
    assert shown.err == ""


def test_gates_of_some_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hybrid: layers 1 and 3 alone have full attention, with 2 heads and 1."""
    alpha = torch.ones(4, 2)
    alpha[1, 0] = 0.25
    alpha[3, 0] = 0.0
    file = tmp_path / "gates.pt"
    HeadGates(alpha, heads=(0, 2, 0, 1)).save(file)
    # layer, mean, at 0, at 1, full at 0.34, gates
    for scope, full in (("global", "20"), ("layer", "11")):
        assert run("inspect", file, "--sparsities", 0.34, "--scope", scope) == 0
        lines = capsys.readouterr().out.splitlines()
        rows = [line.split() for line in lines if line.startswith("    ")]
        assert [row for row in rows if row[0] in "0123"] == [
            ["1", "0.625", "0", "1", full[0], "0.25", "1.00"],
            ["3", "0.000", "1", "0", full[1], "0.00"],
        ]
        assert any(f"ranked by scope {scope}" in line for line in lines)
    assert "shape     4 layers x 2 KV heads, gates in layers 1, 3" in lines
    assert any("mean 0.417; 33.3% at 0" in line for line in lines)
    assert "  0.34: 2 full, 1 compressible, actual 0.3333" in lines
    assert run("plot", file, tmp_path / "map.png") == 0
    assert run("convert", file, tmp_path / "gates.tsv") == 2
    assert "some layers of this model have none" in capsys.readouterr().err
    HeadGates(alpha).save(tmp_path / "dense.pt")
    assert run("diff", file, file) == 0
    assert "Spearman correlation  1.0000" in capsys.readouterr().out
    assert run("diff", file, tmp_path / "dense.pt") == 2
    assert "gates in layers 1, 3" in capsys.readouterr().err
