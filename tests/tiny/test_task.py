"""The task: right by construction, reproducible, and really in need of a long memory."""

import random
import re

import pytest

from rlkv.models.prompts import render_prompt
from rlkv.tiny import MAX_DEFINITIONS, draw_problem, longest_solution, problems
from tests.helpers.models import build_tokenizer

SINK, WINDOW = 4, 16


def solve(problem: str) -> str:
    """Answer a problem from its text alone, independently of the generator."""
    *statements, question = (part.split() for part in problem.removesuffix(" ?").split(" . "))
    values: dict[str, int] = {}
    for words in statements:
        if len(words) == 1:
            name, value = words[0].split("=")
            values[name] = int(value)
        else:
            name, _, left, operator, right = words
            a, b = values[left], values[right]
            values[name] = (a + b if operator == "+" else a - b if operator == "-" else a * b) % 10
    return str(values[question[1]])


def test_answers_and_solutions_are_right() -> None:
    rng = random.Random(0)
    for size in range(3, MAX_DEFINITIONS + 1):
        drawn = draw_problem(rng, size)
        assert solve(drawn.problem) == drawn.answer
        assert f"\\boxed{{ {drawn.answer} }}" in drawn.solution
        steps = re.findall(r"(\d) ([+*-]) (\d) = (\d)", drawn.solution)
        assert len(steps) == size - 2
        for left, operator, right, result in steps:
            assert eval(f"({left} {operator} {right}) % 10") == int(result)


def test_same_seed_same_problems() -> None:
    assert problems(20, seed=3) == problems(20, seed=3)
    assert problems(20, seed=3) != problems(20, seed=4)
    assert problems(5, seed=3) == problems(20, seed=3)[:5]


@pytest.mark.parametrize(("low", "high"), [(2, 5), (6, 5), (3, MAX_DEFINITIONS + 1)])
def test_refuses_impossible_lengths(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="min_definitions="):
        problems(1, seed=0, min_definitions=low, max_definitions=high)


def test_output_lengths_spread_and_recalls_are_far() -> None:
    tokenizer = build_tokenizer()
    rng = random.Random(2)
    lengths, far, recalls = [], 0, 0
    for size in sorted([*range(3, MAX_DEFINITIONS + 1)] * 5):
        item = draw_problem(rng, size)
        prompt = tokenizer.tokenize(render_prompt(tokenizer, item.problem))
        output = tokenizer.tokenize(item.solution)
        lengths.append(len(output))
        assert len(output) + 1 == longest_solution(size)
        text = prompt + output
        for i in range(len(prompt), len(text)):
            if re.fullmatch(r"[a-z]=\d", text[i]) and text[i - 1] == text[i + 1] == ",":
                recalls += 1
                last = max(j for j in range(i) if text[j] == text[i])
                far += i - last > WINDOW and last >= SINK
    assert min(lengths) <= 24
    assert max(lengths) > 400
    assert far / recalls > 0.5


def test_tokenizer_round_trip_and_single_tokens() -> None:
    tokenizer = build_tokenizer()
    drawn = draw_problem(random.Random(5), 9)
    ids = tokenizer(drawn.solution, add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == drawn.solution
    prompt = tokenizer(render_prompt(tokenizer, drawn.problem), add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in prompt
    # bos, user, instruction; definitions; question; assistant
    assert len(prompt) == 3 + 2 * 2 + 7 * 6 + 3 + 1
