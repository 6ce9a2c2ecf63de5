"""The tiny model's word-level tokenizer: one token a word, the fixed sentences of the prompt one
token each.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlkv.models.prompts import RLKV_INSTRUCTION
from rlkv.tiny import ANSWER_PREFIX, ANSWER_SUFFIX, NAMES, OPERATORS

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}{{ raise_exception('the tiny model knows the roles user and assistant only') }}{% "
    "endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over names, digits, operators and bindings such as ``b=3``.

    The instruction of the ``rlkv`` prompt template and the two halves of the answer sentence are
    single tokens, so that the model reads and writes exactly the text of the real models at a tiny
    length.
    """
    words = [*"=.,?", *OPERATORS, "find", *"0123456789", *NAMES]
    words += [f"{name}={digit}" for name in NAMES for digit in range(10)]
    vocab = {word: i for i, word in enumerate([*SPECIAL, *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    sentences = [RLKV_INSTRUCTION, ANSWER_PREFIX, ANSWER_SUFFIX]
    backend.add_tokens(
        [AddedToken(s, lstrip=True, rstrip=True, normalized=False) for s in sentences]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
