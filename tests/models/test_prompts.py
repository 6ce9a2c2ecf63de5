"""Prompt templates, and the text that a model reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlkv.models.prompts import TEMPLATES, choose_template, fill_template, render_prompt
from tests.helpers.models import build_tokenizer

PAPER = (
    "Solve the following math problem efficiently and clearly. The last line of your response "
    "should be of the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope "
    "it is correct' (without quotes) where ANSWER is just the final number or expression that "
    "solves the problem. Think step by step before answering.\n\nWhat is 1+1?"
)


def test_the_papers_prompt_word_for_word() -> None:
    assert fill_template("What is 1+1?") == PAPER


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_problems_go_in_untouched(template: str) -> None:
    before, after = TEMPLATES[template].split("{problem}")
    for problem in ("{x} in {0} \\frac{1}{2} %s %d $1", "{problem}", "", "é\n\u2028x"):
        assert fill_template(problem, template) == before + problem + after


def test_rendering_uses_the_chat_template_if_there_is_one() -> None:
    tokenizer = build_tokenizer()
    text = render_prompt(tokenizer, "find c ?")
    assert text.endswith("<assistant>")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.unk_token_id not in ids
    for bos in ("<s>", None):
        plain = SimpleNamespace(chat_template=None, bos_token=bos)
        assert render_prompt(plain, "x", "plain") == f"{bos or ''}x"


@pytest.mark.parametrize(
    "day",
    [
        "{{ strftime_now('%d %b %Y') }}",  # gpt-oss
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
        "{% endif %}{{ date_string }}",  # Llama 3.2
    ],
)
def test_a_prompt_is_the_same_on_every_day(day: str) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = day + " {{ messages[0].content }}"
    assert render_prompt(tokenizer, "x", "plain") == "26 Jul 2024 x"


def test_the_first_named_template_is_chosen() -> None:
    assert choose_template(None, None, model="tiny") == choose_template(model=None) == "rlkv"
    assert choose_template(None, model="smol") == "plain", "what it was trained on"
    assert choose_template(None, "plain", "boxed", model="tiny") == "plain"
    with pytest.raises(ValueError, match=r"unknown .* template 'math'.*boxed, plain, rlkv"):
        choose_template("math", "plain", model="smol")
    with pytest.raises(ValueError, match="is not text"):
        fill_template("\ud800")
