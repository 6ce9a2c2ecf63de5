"""GGUF files as models: a tiny Qwen2 with random weights, written by the package ``gguf``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from rlkv.models.builtin import forget_blocks
from rlkv.models.gguf import find_gguf
from rlkv.models.loading import load_model, load_tokenizer, model_source
from tests.helpers.models import make_tiny_model

gguf = pytest.importorskip("gguf")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END, END_OF_TURN, START = 26, 27, 28
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


@pytest.fixture(scope="module")
def model() -> Any:
    made = make_tiny_model("qwen2", vocab_size=32, head_dim=8)
    for parameter in made.parameters():  # not the frequencies of positions
        parameter.data = parameter.bfloat16().float()
    return made


def write(model: Any, path: Path, template: str, without: str | None = None) -> Path:
    """Write the model; the file names one end token, the chat template another."""
    writer = gguf.GGUFWriter(path, "qwen2")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = [*LETTERS, "<|end|>", "<|im_end|>", "<|start|>", "<|pad|>", "ab", "cd"]
    control = [gguf.TokenType.CONTROL] * 4
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 26 + control + [gguf.TokenType.NORMAL] * 2)
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(END)
    writer.add_chat_template(template)
    for name, weight in model.state_dict().items():
        for theirs, own in NAMES.items():
            name = name.replace(theirs, own)
        if name != without:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf", TEMPLATE)


@pytest.fixture(autouse=True)
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKV_CACHE", str(tmp_path_factory.getbasetemp() / "models"))


@torch.no_grad()
def test_it_is_the_model_that_was_written(file: Path, model: Any) -> None:
    loaded, tokenizer = load_model(str(file), device="cpu")
    ids = torch.arange(20)[None]
    assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5)
    assert loaded.config._name_or_path == str(file)
    assert tokenizer("cab")["input_ids"] == [2, 30]
    # a chat ends with the turn, too
    assert loaded.generation_config.eos_token_id == [END_OF_TURN, END]
    assert tokenizer.eos_token_id == END_OF_TURN
    assert tokenizer.padding_side == "left"
    chat = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|start|>user a<|im_end|>"


def test_a_file_is_converted_once_wherever_it_lies(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_source(str(file))
    assert Path(folder, "config.json").exists()
    capsys.readouterr()
    (tmp_path / "copy.gguf").write_bytes(file.read_bytes())
    for same in (tmp_path / "copy.gguf", tmp_path):
        assert model_source(str(same)) == folder
    assert capsys.readouterr().err == ""


def test_a_version_that_notes_no_blocks(model: Any) -> None:
    read = copy.deepcopy(model)
    read.config.quantization_config = {}
    for _ in range(2):  # the second time there is none
        forget_blocks(read)
    assert not hasattr(read.config, "quantization_config")


def test_a_folder_with_several_files_is_refused(file: Path, tmp_path: Path) -> None:
    assert find_gguf(str(tmp_path)) is None
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        load_tokenizer(str(tmp_path))
    for number, name in enumerate(("a.gguf", "b.gguf"), start=1):
        (tmp_path / name).rename(tmp_path / f"a-0000{number}-of-00002.gguf")
    for part in (tmp_path, tmp_path / "a-00002-of-00002.gguf"):
        with pytest.raises(ValueError, match="merge the parts with llama-gguf-split"):
            load_tokenizer(str(part))
    (tmp_path / "config.json").write_text("{}")  # a model folder, whatever else lies in it
    assert find_gguf(str(tmp_path)) is None


def test_a_file_that_is_no_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match=r"transformers cannot read the GGUF file '.*bad.gguf'"):
        load_model(str(bad), device="cpu")
    with pytest.raises(ValueError, match="original folder"):
        model_source(str(bad))


def test_a_part_of_a_model_is_refused(model: Any, tmp_path: Path) -> None:
    part = write(model, tmp_path / "part.gguf", TEMPLATE, without="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match="1 tensors are missing; is it one part of several"):
        model_source(str(part))


def test_a_chat_template_that_raises_says_nothing_of_ends(model: Any, tmp_path: Path) -> None:
    path = write(model, tmp_path / "odd.gguf", "{{ raise_exception('no') }}")
    assert load_tokenizer(str(path)).eos_token_id == END


def test_an_absent_file_is_said_to_be_absent() -> None:
    with pytest.raises(ValueError, match=r"'absent\.gguf': there is no such file"):
        load_tokenizer("absent.gguf")
