"""Where the outputs to filter come from: a rollout engine, or a file of recorded outputs.

Both yield ``(index, output)`` in any order, each index once; a string says why there is no output.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlkv.data.deepscaler import Problem, read_rows, text_field
from rlkv.models.prompts import render_prompt
from rlkv.rollout.base import RolloutEngine, SamplingParams

SKIPPED, MISSING = "skipped", "missing"


@dataclass(frozen=True)
class Output:
    """One output; ``truncated`` if it was cut at the token limit."""

    text: str
    tokens: int
    truncated: bool


class EngineDecoder:
    """Greedy decoding; problems whose prompt leaves no room for ``max_new_tokens`` are skipped."""

    def __init__(self, engine: RolloutEngine, template: str, max_new_tokens: int, max_length: int) -> None:
        """``max_length`` bounds prompt and completion together, in addition to the model's own limit."""
        self.engine, self.template = engine, template
        self.sampling = SamplingParams(max_new_tokens)
        limit = min(max_length, engine.max_positions)
        self.max_prompt = limit - max_new_tokens
        if self.max_prompt < 1:
            raise ValueError(
                f"max_new_tokens {max_new_tokens} leaves no room for a prompt in {limit} tokens (the lesser of "
                f"max_length {max_length} and the model's {engine.max_positions} positions): lower --max-new-tokens"
            )

    def stream(self, problems: list[tuple[int, Problem]]) -> Iterator[tuple[int, Output | str]]:
        prompts = [render_prompt(self.engine.tokenizer, problem.problem, self.template) for _, problem in problems]
        fitting = []
        for row, length in enumerate(self.engine.prompt_lengths(prompts)):
            if length <= self.max_prompt:
                fitting.append(row)
            else:
                yield problems[row][0], SKIPPED
        for i, completion in self.engine.stream([prompts[row] for row in fitting], self.sampling):
            output = Output(completion.text, len(completion.token_ids), completion.finish_reason == "length")
            yield problems[fitting[i]][0], output


class RecordedDecoder:
    """Outputs that were decoded elsewhere, looked up by the text of the problem.

    Where a problem occurs several times, its first occurrence gets the first recorded output, and so on.
    Tokens are counted with ``tokenizer``, plus one for the end token that a recorded text lacks; an output
    of more than ``max_new_tokens`` counts as truncated.
    """

    def __init__(self, path: str, field: str, problems: list[Problem], tokenizer: Any, max_new_tokens: int) -> None:
        """``problems``: all problems of the input; ``ValueError`` if no output of the file belongs to any of them."""
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        recorded: dict[str, deque[str]] = defaultdict(deque)
        for where, row in read_rows(path):
            recorded[text_field(row, "problem", where)].append(text_field(row, field, where))
        self.texts = {i: recorded[p.problem].popleft() for i, p in enumerate(problems) if recorded[p.problem]}
        if not self.texts:
            raise ValueError(
                f"no recorded output in {path} belongs to a problem of the input: the problem texts differ"
            )

    def stream(self, problems: list[tuple[int, Problem]]) -> Iterator[tuple[int, Output | str]]:
        for index, _ in problems:
            text = self.texts.get(index)
            if text is None:
                yield index, MISSING
                continue
            tokens = len(self.tokenizer(text, add_special_tokens=False).input_ids) + 1
            yield index, Output(text, tokens, tokens > self.max_new_tokens)


Decoder = EngineDecoder | RecordedDecoder
