"""A page that shows which tokens of a text the cache still holds: each token shaded by how many heads hold it."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from rlkv.cache import HeadReallocationCache
from rlkv.utils.atomic import atomic_path

CONTEXT = 4  # tokens before a token that decide how it is written (spaces, accents in several tokens)

_STYLE = """
body { font: 15px/1.7 ui-monospace, monospace; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
h1 { font-size: 1.2rem } p.note { color: #555; font-family: sans-serif }
.text { white-space: pre-wrap; overflow-wrap: anywhere }
.text span { border-radius: 2px } .gone { color: #a8a8a8 } .new { text-decoration: underline dotted }
.answer { border-left: 3px solid #7f0000; padding-left: 2px }
.bar { display: inline-block; width: 12rem; height: .9rem; vertical-align: middle;
  background: linear-gradient(90deg, #fff3e0, #f4843c, #7f0000) }
"""


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds; joined they are the text.

    A character that takes several tokens belongs to the last of them.
    """
    texts, start = [], 0  # start: the first token of a character that is still open
    for i in range(len(ids)):
        before = ids[max(0, start - CONTEXT) : start]
        known = tokenizer.decode(before) if before else ""
        text = tokenizer.decode([*before, *ids[start : i + 1]])[len(known) :]
        whole = not text.endswith("\ufffd") or i + 1 == len(ids) or i - start >= CONTEXT
        texts.append(text if whole else "")
        start = i + 1 if whole else start
    return texts


def shade(share: float) -> str:
    """CSS colour from light orange (few heads) over orange to dark red (all heads), ``share`` in (0, 1]."""
    stops = ((255, 243, 224), (244, 132, 60), (127, 0, 0))
    low, high, part = (stops[0], stops[1], share * 2) if share < 0.5 else (stops[1], stops[2], share * 2 - 1)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def render_kept_page(tokenizer: Any, ids: list[int], prompt_tokens: int, cache: HeadReallocationCache) -> str:
    """The page as HTML; it needs no network.

    Args:
        ids: prompt and completion of the one row in ``cache``.
        prompt_tokens: how many of them are the prompt.
        cache: recorded (``record=True``) if it has an eviction policy.
    """
    held = cache.held(0)
    heads, counts = held.shape[0] * held.shape[1], held.flatten(0, 1).sum(0).tolist()
    policy = cache.settings.eviction
    kind = policy.name if policy is not None else f"sinks {cache.settings.sink} and window {cache.settings.window}"
    num_full, num_compressible = cache.num_heads()
    spans = []
    for position, text in enumerate(token_texts(tokenizer, ids)):
        marks = ["answer"] if position == prompt_tokens else []
        if position >= len(counts):
            style, title = "", "not cached yet"
            marks.append("new")
        elif counts[position] == 0:
            style, title = "", f"token {position}: gone"
            marks.append("gone")
        else:
            share = counts[position] / heads
            colour = "#fff" if share > 0.65 else "#1c1c1c"
            style = f' style="background:{shade(share)};color:{colour}"'
            title = f"token {position}: held by {counts[position]} of {heads} heads"
        cls = f' class="{" ".join(marks)}"' if marks else ""
        spans.append(f'<span{cls}{style} title="{title}">{html.escape(text)}</span>')
    gone = counts.count(0)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>What the KV cache holds</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>What the KV cache holds after {len(counts)} tokens</h1>\n"
        f'<p class="note">{num_full} heads are full, {num_compressible} compressible ({html.escape(kind)}). Bytes of '
        f"KV in use / bytes of the full cache: {cache.used_nbytes():,} / {cache.full_nbytes():,} "
        f"({cache.used_nbytes() / cache.full_nbytes():.1%}). "
        f"{gone} {'token is' if gone == 1 else 'tokens are'} gone from all heads (grey).<br>"
        f'Held by 1 head <span class="bar"></span> by all {heads}. A bar on the left marks the start of the answer; '
        f"point at a token for its number.</p>\n"
        f'<div class="text">{"".join(spans)}</div>\n</body></html>\n'
    )


def write_kept_page(
    path: Path, tokenizer: Any, ids: list[int], prompt_tokens: int, cache: HeadReallocationCache
) -> None:
    """Write :func:`render_kept_page` to ``path``."""
    with atomic_path(path) as partial:
        partial.write_text(render_kept_page(tokenizer, ids, prompt_tokens, cache), encoding="utf-8")
