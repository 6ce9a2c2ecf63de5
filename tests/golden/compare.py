"""Records as JSON files that are easy to read, and their differences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def shortened(entries: dict[str, Any]) -> dict[str, Any]:
    """Replace what is long and equal to an earlier entry, also in an entry, by its name."""
    names: dict[str, str] = {}

    def short(value: Any) -> Any:
        text = json.dumps(value, sort_keys=True)
        if text in names and len(text) > 60:
            return f"as {names[text]}"
        return {name: short(of) for name, of in value.items()} if isinstance(value, dict) else value

    found: dict[str, Any] = {}
    for name, value in entries.items():
        found[name] = short(value)
        names.setdefault(json.dumps(value, sort_keys=True), name)
    return found


def layout(value: Any, indent: str = "") -> str:
    """Write JSON with a line for what is short."""
    short = json.dumps(value, ensure_ascii=False)
    if len(short) + len(indent) <= 140 or not isinstance(value, dict | list):
        return short
    inner = indent + " "
    if isinstance(value, dict):
        lines = []
        for name, of in value.items():
            lines.append(f"{inner}{json.dumps(name, ensure_ascii=False)}: {layout(of, inner)}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if all(isinstance(of, int | float) for of in value):
        return short
    return "[\n" + ",\n".join(inner + layout(of, inner) for of in value) + f"\n{indent}]"


def differences(recorded: Any, found: Any, tolerance: float, place: str) -> Iterator[str]:
    """Yield one line per difference, with its place in the file."""
    lists = isinstance(recorded, list) and isinstance(found, list)
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in recorded | found:
            inner = f"{place} > {name}"
            if name not in found:
                yield f"{inner}: gone, was {shown(recorded[name])}"
            elif name not in recorded:
                yield f"{inner}: new, {shown(found[name])}"
            else:
                yield from differences(recorded[name], found[name], tolerance, inner)
    elif lists and {type(of) for of in recorded + found} == {str}:
        lines = [f"{place}: gone, was {shown(line)}" for line in recorded if line not in found]
        lines += [f"{place}: new, {shown(line)}" for line in found if line not in recorded]
        if recorded != found and not lines:
            lines.append(f"{place}: another order or number, {shown(found)}")
        yield from lines
    elif lists and len(recorded) == len(found):
        for index, (old, new) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(old, new, tolerance, f"{place}[{index}]")
    elif not close(recorded, found, tolerance):
        yield f"{place}: {shown(recorded)} -> {shown(found)}"


def close(recorded: Any, found: Any, tolerance: float) -> bool:
    """Tell whether two values are equal, of figures within the tolerance."""
    if isinstance(recorded, float) and isinstance(found, int | float):
        return abs(recorded - found) <= tolerance * max(1.0, abs(recorded))
    return type(recorded) is type(found) and bool(recorded == found)


def shown(value: Any) -> str:
    """Return JSON that fits into a line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."


def kept(recorded: Any, found: Any, tolerance: float) -> Any:
    """Return ``found`` with what was recorded in the place of figures that are close to it."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return {name: kept(recorded.get(name), value, tolerance) for name, value in found.items()}
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        return [kept(old, new, tolerance) for old, new in zip(recorded, found, strict=True)]
    return recorded if close(recorded, found, tolerance) else found


def rounded(value: Any) -> Any:
    """Round to eight significant digits, which are more than any tolerance asks for."""
    if isinstance(value, dict):
        return {name: rounded(of) for name, of in value.items()}
    if isinstance(value, list):
        return [rounded(of) for of in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value
