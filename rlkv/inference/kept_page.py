"""A page that shows which tokens of a text the cache still holds: each token shaded by how many heads hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Template

from rlkv.cache import HeadReallocationCache

CONTEXT = 4  # tokens before a token that decide how it is written (spaces, accents in several tokens)

TEMPLATE = Path(__file__).with_suffix(".html.j2")


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
    """The page as HTML.

    Args:
        ids: prompt and completion of the one row in ``cache``.
        prompt_tokens: how many of them are the prompt.
        cache: recorded (``record=True``) if it has an eviction policy.
    """
    held = cache.held(0)
    heads, counts = held.shape[0] * held.shape[1], held.flatten(0, 1).sum(0).tolist()
    spans: list[dict[str, Any]] = []
    for position, text in enumerate(token_texts(tokenizer, ids)):
        mark, title, colours = "", f"token {position}: gone", None
        if position >= len(counts):
            mark, title = "new", "not cached yet"
        elif counts[position] == 0:
            mark = "gone"
        else:
            share = counts[position] / heads
            title = f"token {position}: held by {counts[position]} of {heads} heads"
            colours = (shade(share), "#fff" if share > 0.65 else "#1c1c1c")
        marks = f"{'answer' if position == prompt_tokens else ''} {mark}".strip()
        spans.append({"text": text, "marks": marks, "title": title, "colours": colours})
    policy, sizes = cache.settings.eviction, cache.settings
    return Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True, keep_trailing_newline=True).render(
        spans=spans,
        tokens=len(counts),
        gone=counts.count(0),
        heads=heads,
        num_full=int(cache.full.sum()),
        num_compressible=int((~cache.full).sum()),
        kind=policy.name if policy is not None else f"sinks {sizes.sink} and window {sizes.window}",
        used=cache.used_nbytes(),
        full=cache.full_nbytes(),
    )
