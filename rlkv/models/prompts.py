"""Prompt templates, and the one path from a problem to the text that a model reads.

Source of ``rlkv``: arXiv 2510.08525, the template of the published training and evaluation code.
"""

from __future__ import annotations

from datetime import date
from typing import Any

from rlkv.models.builtin import SMOL
from rlkv.utils.files import is_text

RLKV_INSTRUCTION = (
    "Solve the following math problem efficiently and clearly. The last line of your response "
    "should be of the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. "
    "I hope it is correct' (without quotes) where ANSWER is just the final number or expression "
    "that solves the problem. Think step by step before answering."
)

TEMPLATES = {
    "rlkv": RLKV_INSTRUCTION + "\n\n{problem}",
    "boxed": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "plain": "{problem}",
}

DEFAULT_TEMPLATE = "rlkv"
# that chat templates write (Llama 3.2, gpt-oss): prompts are the same on every day.  Templates of
# Llama take it where they have no clock.
DAY = date(2024, 7, 26)
OF_MODEL = {SMOL: "plain"}  # what a built-in model was trained on, where it is not the default


def choose_template(*names: str | None, model: str | None) -> str:
    """Return the first template that is named, else the model's own.

    Callers name the user's wish first, then what data or gates were made with.

    Raises:
        ValueError: if there is no such template.
    """
    named = [name for name in names if name is not None]
    template = named[0] if named else OF_MODEL.get(model or "", DEFAULT_TEMPLATE)
    fill_template("", template)
    return template


def fill_template(problem: str, template: str = DEFAULT_TEMPLATE) -> str:
    """Return the user's message for ``problem``.

    Raises:
        ValueError: if ``template`` is not a name in :data:`TEMPLATES`, or ``problem`` cannot be
            written as UTF-8.
    """
    if not is_text(problem):
        raise ValueError(
            "the problem is not text: it holds half a surrogate pair or bytes that are not UTF-8"
        )
    if template not in TEMPLATES:
        raise ValueError(
            f"unknown prompt template {template!r}: choose one of {', '.join(sorted(TEMPLATES))}"
        )
    # replace, not format: problems and instructions are full of braces
    return TEMPLATES[template].replace("{problem}", problem)


def build_messages(problem: str, template: str = "rlkv") -> list[dict[str, str]]:
    """Return one user turn, in the form that chat templates and trl take."""
    return [{"role": "user", "content": fill_template(problem, template)}]


def render_messages(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return the text of a chat by the model's chat template, with the opening of its answer."""
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, strftime_now=DAY.strftime
    )


def render_prompt(tokenizer: Any, problem: str, template: str = "rlkv") -> str:
    """Return the text to tokenize, with ``add_special_tokens=False``.

    It follows the chat template if the tokenizer has one.
    """
    if tokenizer.chat_template:
        return render_messages(tokenizer, build_messages(problem, template))
    return (tokenizer.bos_token or "") + fill_template(problem, template)
