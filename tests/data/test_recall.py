"""The recall task in text: lengths, where the answers lie, the haystack, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlkv.data.recall import PASSKEY_WORDS, TextRecall, filler_words, read_haystack


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level BPE like those of real models, trained on 400 invented words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioulmnrst", k=rng.randint(3, 8))) for _ in range(400)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([" " + " ".join(words)] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def test_samples_hide_what_is_asked_for(tokenizer: Any) -> None:
    task = TextRecall(tokenizer, None, passkeys=3, passkey_words=4, min_length=900, max_length=1200)
    lengths = set()
    for seed in range(5):
        sample = task.draw(random.Random(seed))
        lengths.add(len(sample.ids))
        assert 900 <= len(sample.ids) <= 1200
        assert sample.ids[0] == tokenizer.bos_token_id
        assert sample.answers == tuple(
            range(sample.answers[0], len(sample.ids))
        )  # all that follows the haystack
        asked = tokenizer.decode([sample.ids[i] for i in sample.answers])
        answers = [part.split()[:4] for part in asked.split("passkey is:")[1:]]
        assert len(answers) == 3
        assert {word for words in answers for word in words} <= set(PASSKEY_WORDS)
        assert asked.count("What was the") == 3
        before = tokenizer.decode(sample.ids[: sample.answers[0]])
        places = [before.index(f"passkey is: {' '.join(words)}") / len(before) for words in answers]
        assert places == sorted(places)
        assert 0.04 < places[0] < places[-1] < 0.96
        assert "third passkey is" in before
    assert len(lengths) > 1
    assert task.draw(random.Random(1)) == task.draw(random.Random(1)) != task.draw(random.Random(2))


def test_the_haystack_is_the_given_text(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("moral tales of the sea " * 3)
    haystack = read_haystack(str(file), tokenizer)
    task = TextRecall(
        tokenizer, haystack, passkeys=2, passkey_words=2, min_length=700, max_length=700
    )
    sample = task.draw(random.Random(0))
    assert len(sample.ids) == 700  # longer than the file: it is repeated
    assert tokenizer.decode(sample.ids).count("moral tales") > 3


def test_generated_filler_is_made_of_whole_words(tokenizer: Any) -> None:
    words = filler_words(tokenizer)
    assert len(words) >= 200
    assert all(len(tokenizer(f" {word}").input_ids) == 1 for word in words)


def test_what_cannot_work_is_one_sentence(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"passkeys.*\[1, 16\].*17"):
        TextRecall(tokenizer, [5], passkeys=17)
    with pytest.raises(ValueError, match="max_length=100"):
        TextRecall(tokenizer, [5], passkeys=3, min_length=50, max_length=100)
    with pytest.raises(ValueError, match=r"--haystack nowhere.txt"):
        read_haystack("nowhere.txt", tokenizer)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty.txt"):
        read_haystack(str(tmp_path / "empty.txt"), tokenizer)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary.txt"):
        read_haystack(str(tmp_path / "binary.txt"), tokenizer)


def test_a_vocabulary_without_words_asks_for_a_haystack() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="--haystack"):
        filler_words(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
