"""Generate with the full KV cache in the heads that need it and a small one in all others.

--gates says which heads stay full, --eviction what the others keep (else: sinks and a window).

One prompt, on the built-in model with its own gates:
    rlkv-infer --model tiny --prompt "a=7 . b=2 . c = b + a . find c ?"

A chat, with answers up to the model's limit (Ctrl-C stops one, /reset starts over, Ctrl-D ends it):
    rlkv-infer --gates results/demo/gates.pt --sparsity 0.5

A file of problems, resumed where it stopped, with accuracy if they have answers:
    rlkv-infer --gates gates.pt --sparsity 0.5 --input problems.jsonl --output answers.jsonl

The same against the full cache, side by side:
    rlkv-infer --gates gates.pt --sparsity 0.5 --input problems.jsonl --output both.jsonl \\
        --compare-full

R-KV in the compressible heads, and in all heads (token eviction as published):
    rlkv-infer --gates gates.pt --sparsity 0.5 --eviction rkv --budget 256 --prompt "..."
    rlkv-infer --model tiny --eviction rkv --budget 64 --prompt "..."

Many problems at once through vLLM (pip install 'rlkv[vllm]'):
    rlkv-infer --backend vllm --gates gates.pt --batch-size 64 --input problems.jsonl \\
        --output answers.jsonl

Another model, sampled:
    rlkv-infer --gates gates.pt --model ./Qwen3-4B --prompt "..." --temperature 0.6 --top-p 0.95
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from rlkv.cli.app import parse, run_app
from rlkv.eviction import POLICIES
from rlkv.inference.engine import Chat, OnText, Reply
from rlkv.inference.session import InferConfig, InferSession, run_batches
from rlkv.rollout.base import Completion
from rlkv.vllm.settings import EVICTIONS

TAGS = re.compile("(<think>|</think>)")
DIM, NORMAL = "\033[2m", "\033[0m"


class ThinkingStream:
    """Prints each piece of text at once, on a terminal the thinking in dim letters.

    Texts come in whole words, so a tag is never split.

    Args:
        prompt: the rendered one; the chat templates of some models open the thinking at its end.
    """

    def __init__(self, prompt: str) -> None:
        self._styled = sys.stdout.isatty()
        if prompt.rstrip().endswith("<think>"):
            self._style(DIM)

    def __call__(self, text: str) -> None:
        for part in TAGS.split(text):
            if part == "<think>":
                self._style(DIM)
            print(part, end="", flush=True)
            if part == "</think>":
                self.close()

    def _style(self, code: str) -> None:
        if self._styled:
            print(code, end="", flush=True)

    def close(self) -> None:
        """Go back to normal letters, wherever the text has ended."""
        self._style(NORMAL)


def infer() -> None:
    """Parse the command line, load the model and answer."""
    description = (
        f"{__doc__}\nPolicies of --eviction: {', '.join(POLICIES)}; with --backend vllm "
        f"{', '.join(EVICTIONS)}."
    )
    config = parse(InferConfig, description)
    session = InferSession.open(config)
    if config.is_chat:
        _chat(session)
    elif config.prompt is None:
        _answer_file(session)
    elif config.backend == "vllm":
        _answer_vllm(session, config.prompt)
    else:
        _answer(session, config.prompt)


def _say(text: str) -> None:
    """Print a fact to stderr: stdout is the model's text alone."""
    print(text, file=sys.stderr, flush=True)


def _streamed(session: InferSession, decode: Callable[[OnText], Reply], message: str) -> Reply:
    """Return what ``decode`` returns, with its text on stdout as it comes."""
    stream = ThinkingStream(session.render(message))
    try:
        reply = decode(stream)
    finally:
        stream.close()
    print(flush=True)
    return reply


def _cut(completion: Completion) -> str:
    if completion.finish_reason != "length":
        return ""
    limit = "--max-new-tokens, its default or the model's limit"
    return f", cut at {len(completion.token_ids)} tokens ({limit})"


def _answer(session: InferSession, prompt: str) -> None:
    engine, sampling = session.engine, session.sampling
    (ids,) = engine.tokenize([session.render(prompt)])
    reply = _streamed(session, partial(engine.reply, ids, sampling), prompt)
    if not session.config.compare_full:
        _say(f"{reply.usage.summary()}, {session.heads()}{_cut(reply.completion)}")
        return
    _say("--- full cache:")
    full = _streamed(session, partial(engine.reply, ids, sampling, full=True), prompt)
    same = "the same tokens" if reply.completion == full.completion else "other tokens"
    _say(f"compressed  {reply.usage.summary()}, {session.heads()}{_cut(reply.completion)}")
    _say(f"full cache  {full.usage.summary()}, {same}{_cut(full.completion)}")


def _answer_vllm(session: InferSession, prompt: str) -> None:
    (completion,), usage = session.engine.batch([session.render(prompt)], session.sampling)
    print(completion.text, flush=True)
    _say(f"{usage.summary()}, {session.heads()}{_cut(completion)}")


def _answer_file(session: InferSession) -> None:
    rows, resumed, usages = run_batches(session)
    earlier = f", {resumed} of them from an earlier run" if resumed else ""
    _say(f"{len(rows)} answers in {session.config.output}{earlier}")
    for suffix, usage in usages.items():
        name = "full cache" if suffix else "compressed"
        if usage.tokens:
            heads = "" if suffix else f", {session.heads()}"
            _say(f"{name}  {usage.summary()} (largest batch){heads}")
        judged = [row["correct" + suffix] for row in rows if "correct" + suffix in row]
        if judged:
            without = len(rows) - len(judged)
            note = f", {without} more have no answer to compare with" if without else ""
            share = sum(judged) / len(judged)
            _say(f"{name}  accuracy {share:.4f} over {len(judged)} problems{note}")


def _chat(session: InferSession) -> None:
    chat = Chat(session.engine, session.sampling, session.template)
    _say("Chat: /reset starts over, Ctrl-D ends.")
    if session.template != "plain":
        _say(
            f"Messages are sent in the prompt template {session.template!r}; as they are with "
            "--template plain."
        )
    while True:
        try:
            message = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if message == "/reset":
            chat.reset()
        elif message:
            _chat_turn(session, chat, message)


def _chat_turn(session: InferSession, chat: Any, message: str) -> None:
    restarted = chat.restarted
    try:
        reply = _streamed(session, partial(chat.say, message), message)
    except ValueError as error:  # a text that became too long ends the turn, not the chat
        _say(f"error: {error}")
        return
    except KeyboardInterrupt:
        _say("\nstopped; this turn is forgotten")
        return
    note = ", the template rewrote the past: read again" if chat.restarted > restarted else ""
    _say(f"{reply.usage.summary()}, {session.heads()}{_cut(reply.completion)}{note}")


main = partial(run_app, infer)


if __name__ == "__main__":
    main()
