"""The programs as a user starts them: files, exit codes, and one sentence where something is
missing.
"""

import json
import runpy
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.models import build_tokenizer, make_tiny_model
from tests.helpers.paths import ROOT


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    make_tiny_model(
        "qwen3", vocab_size=len(tokenizer), max_position_embeddings=256
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


class Runner:
    """Starts a program in this process, as ``python program arguments`` would.

    Importing torch again costs seconds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, program: str, *arguments: str) -> Ended:
        self.monkeypatch.setattr(sys, "argv", [program, *arguments])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        return Ended(ended.value.code, *self.capsys.readouterr())  # type: ignore[arg-type]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def test_filter_program(run: Runner, tmp_path: Path, model_folder: str) -> None:
    options = [
        "--model",
        model_folder,
        "--input",
        "tiny",
        "--num-problems",
        "6",
        "--output-dir",
        str(tmp_path / "out"),
    ]
    options += ["--max-length", "250", "--buckets", "0-4:3,4-8:3"]
    first = run(
        "data_prep/filter_deepscaler.py", *options, "--max-new-tokens", "8", "--shard", "0/2"
    )
    assert first.code == 0, first.stderr
    assert "Shard 0/2 is complete. Not complete yet: 1/2 (3 problems)" in first.stdout
    second = run(
        "data_prep/filter_deepscaler.py", *options, "--max-new-tokens", "8", "--shard", "1/2"
    )
    assert second.code == 0, second.stderr
    assert "None of the 6 problems was solved" in second.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["loaded"] == 6
    assert report["versions"]["torch"]
    third = run(
        "data_prep/filter_deepscaler.py", *options, "--shard", "1/2", "--max-new-tokens", "9"
    )
    assert third.code == 2
    assert "max_new_tokens was 8 and is now 9" in third.stderr


def test_the_report_names_paths_as_they_were_given(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"problem": "p", "answer": "7", "output": "\\\\boxed{7}"}\n')
    done = run(
        "data_prep/filter_deepscaler.py",
        "--model",
        "tiny",
        "--outputs",
        "mine.jsonl",
        "--output-dir",
        "o/out",
    )
    assert done.code == 0, done.stderr
    assert "Curriculum and report: o/out" in done.stdout
    config = json.loads(Path("o/out/report.json").read_text())["config"]
    assert (config["input"], config["outputs"], config["output_dir"]) == (
        "mine.jsonl",
        "mine.jsonl",
        "o/out",
    )
    for name in ("report.json", "report.md"):
        assert str(tmp_path) not in Path("o/out", name).read_text()


NO_VLLM = pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed here")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--engine", "vllm"],
            "comes with the extra rlkv[vllm], which is not installed",
            marks=NO_VLLM,
        ),
        (["--buckets", "9-3:1"], "bucket 9-3:1 is impossible"),
        (["--config", "absent.yaml"], "got 'absent.yaml'"),
        (["--input", "absent.jsonl"], "absent.jsonl does not exist"),
    ],
)
def test_filter_program_errors(
    run: Runner, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run(
        "data_prep/filter_deepscaler.py",
        "--model",
        "tiny",
        "--output-dir",
        str(tmp_path),
        *arguments,
    )
    assert done.code == 2
    assert "Traceback" not in done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
