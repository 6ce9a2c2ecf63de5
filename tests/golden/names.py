"""Public names: of options, of Python, of configs, of the vLLM plugin and of the environment."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from tests.golden.compare import shortened
from tests.golden.runs import PROGRAMS, PROJECT, ROOT, SUBCOMMANDS, invoke


def options_of(help_text: str) -> dict[str, str]:
    """Read names of options and their defaults from what argparse or tyro print.

    Raises:
        ValueError: if groups stand side by side, as tyro prints them on a wide terminal.
    """
    if re.search("╮ *╭|-{9} +-{9}", help_text):
        raise ValueError("--help has two columns: record with COLUMNS=100")
    found: dict[str, str] = {}
    name = ""
    for line in re.split(r"\n(?=options:|╭)", help_text, maxsplit=1)[-1].splitlines():
        start = re.match(r"(?:│ |  )(?:-h, )?(--\w[\w-]*|(?:[A-Z_]+|hf://\S+)(?=  ))", line)
        if start:
            name = start[1].replace("_", "-")
            found[name] = ""
        if re.match(" ?[^ │]", line):
            name = ""  # the heading of a group
        if name:
            found[name] += " " + line.strip("│ ")
    for name, text in found.items():
        default = re.search(r"\((?:default: (.*)|required)\)$", text.strip())
        shown = "" if default is None else "required" if default[1] is None else default[1]
        found[name] = re.sub(r"[\[\]',]", "", shown).replace(str(ROOT), ".")
    # of --NAME and --no-NAME the first is enough
    twice = [name for name in found if name.startswith("--no-") and f"--{name[5:]}" in found]
    found |= {name: "cores" for name in found if name == "--workers"}
    return {name: value for name, value in found.items() if name not in (*twice, "--help")}


def record_options() -> dict[str, Any]:
    """List the options of all commands and programs."""
    commands = [name for name in PROJECT["scripts"]]
    commands += [f"{name} {sub}" for name, subs in SUBCOMMANDS.items() for sub in subs.split()]
    for folder in PROGRAMS:
        commands += [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob("*.py"))]
    found: dict[str, Any] = {}
    for command in commands:
        said = invoke([*command.split(), "--help"])
        found[command] = options_of(said.out) if said.code == 0 else f"exit code {said.code}"
    return shortened(found)


def signature(value: Any) -> str:
    """Write names and defaults of parameters, without types."""
    given = inspect.signature(value)
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in given.parameters.values()]
    text = given.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return re.sub(r" at 0x\w+", "", str(text))


def members(kind: type) -> dict[str, str]:
    """List the public members that this package defines, with signatures of methods."""
    foreign: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("rlkv"):
            foreign.update(dir(base))
    found = {"()": signature(kind)}
    for name in dir(kind):
        if name.startswith("_") or name in foreign or name in inspect.signature(kind).parameters:
            continue
        value = getattr(kind, name)
        found[name] = signature(value) if callable(value) else type(value).__name__
    return found


def record_api() -> dict[str, Any]:
    """List the public names of Python, configs, the vLLM plugin and the environment."""
    import rlkv
    from rlkv.vllm.settings import parse_settings

    documented = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    names: dict[str, Any] = {}
    for dotted in documented:
        module, _, name = dotted.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        room = dotted.split(".")[1]
        found = members(value) if isinstance(value, type) else signature(value)
        if room == "eviction" and name != "EvictionPolicy":
            # what a policy does not add is in its base
            base = names.get("eviction.EvictionPolicy", {})
            found = {member: of for member, of in found.items() if base.get(member) != of}
        names[f"{room}.{name}"] = found
    try:
        parse_settings({"?": 1})
    except ValueError as error:
        settings = str(error).partition("choose from ")[2].split(", ")
    configs = ROOT / "configs"
    code = "\n".join(path.read_text() for path in sorted((ROOT / "rlkv").rglob("*.py")))
    return {
        "rlkv": sorted(rlkv.__all__),
        "docs/api.md": names,
        "console scripts": sorted(PROJECT["scripts"]),
        "extras": sorted(PROJECT["optional-dependencies"]),
        "plugins": {name: sorted(of) for name, of in PROJECT["entry-points"].items()},
        "configs": sorted(str(file.relative_to(configs)) for file in configs.rglob("*.yaml")),
        "vllm additional-config": settings,
        "vllm metrics": sorted(set(re.findall(r'"(rlkv:[a-z_]+)"', code))),
        "environment": sorted(set(re.findall(r"\bRLKV_[A-Z_]+\b", code))),
    }
