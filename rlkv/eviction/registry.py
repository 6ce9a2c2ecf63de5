"""The registry of eviction policies, and policies from a name and options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from rlkv.eviction.base import EvictionPolicy
from rlkv.utils.jsonl import parse_json

P = TypeVar("P", bound=EvictionPolicy)
_policies: dict[str, type[EvictionPolicy]] = {}
POLICIES: Mapping[str, type[EvictionPolicy]] = MappingProxyType(_policies)  # read-only: see register()


def register(policy: type[P]) -> type[P]:
    """Class decorator: every command, study and test knows the policy by its ``name`` from here on."""
    if policy.name in _policies:
        raise ValueError(f"there is already an eviction policy {policy.name!r}: {_policies[policy.name].__qualname__}")
    _policies[policy.name] = policy
    return policy


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Fields and values from texts such as ``variant=published``, ``lam=0.2`` or ``protect_prompt=true``."""
    fields: dict[str, Any] = {}
    for text in texts:
        field, separator, value = text.partition("=")
        if not separator or not field:
            raise ValueError(f"option {text!r} is not written as name=value, such as variant=published")
        if field in fields:
            raise ValueError(f"option {field} is given twice")
        try:
            fields[field] = parse_json(value.lower() if value.lower() in ("true", "false") else value)
        except ValueError:
            fields[field] = value  # a word
    return fields


def make_policy(name: str, **options: Any) -> EvictionPolicy:
    """The policy ``name`` with the fields ``options``; ValueError for unknown names and values that it refuses."""
    if name not in POLICIES:
        raise ValueError(f"there is no eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    known = inspect.signature(POLICIES[name]).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}: its options are {', '.join(known)}")
    return POLICIES[name](**options)
