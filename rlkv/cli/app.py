"""The one command-line parser: typed dataclasses, YAML files, presets, and how a command ends.

The fields of a dataclass, with their types and the texts below or in them, are the options of a
command.  ``--config`` names a packaged YAML file or a path: it sets defaults, options override
them, and unknown names are refused.  A class with a field ``preset`` takes what neither sets from
``configs/presets/PRESET.yaml``.  What was parsed *is* what a result file records
(``dataclasses.asdict``).
"""

from __future__ import annotations

import difflib
import errno
import io
import json
import logging
import os
import select
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import Field, field, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
import yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"  # a part of the package
T = TypeVar("T")
CONFIG_HELP = """

--config {what} sets defaults from YAML with these names.
--verbose shows what other libraries print as well."""
YES = {"true", "yes", "1"}
NO = {"false", "no", "0"}
OTHERS = "others"  # the group of options that --help does not show


# --- config files


def packaged(names: Collection[str]) -> list[str]:
    """Return the names of the packaged configs that set nothing but options of ``names``."""
    paths = sorted(CONFIGS.glob("*.yaml"))
    return [path.stem for path in paths if read_config(path).keys() <= set(names)]


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file; ``base: NAME`` adds what only NAME.yaml, in the same folder, sets.

    Raises:
        ValueError: if the file or its base cannot be read or is not a mapping, or if the base has a
            base.
    """
    values = _read_mapping(path)
    base = values.pop("base", None)
    if base is None:
        return values
    folder = path.resolve().parent
    if not base or (folder / f"{base}.yaml").parent != folder:
        raise ValueError(
            f"--config {path}: base: {base!r} is not the name of a config in its folder, without "
            ".yaml"
        )
    if not (folder / f"{base}.yaml").is_file():
        raise ValueError(f"--config {path}: its base {base}.yaml is not in {folder}")
    inherited = _read_mapping(path.with_name(f"{base}.yaml"))
    if "base" in inherited:
        raise ValueError(
            f"--config {path}: its base {base} has a base itself: name a file that has none"
        )
    return inherited | values


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path} is not readable as YAML: {reason}") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ValueError(f"--config {path} holds a {kind}: write name: value on each line")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def preset_file(name: str) -> Path:
    """Return the packaged file of a preset, such as ``modern``; ValueError lists them."""
    files = {path.stem: path for path in sorted((CONFIGS / "presets").glob("*.yaml"))}
    if name not in files:
        raise ValueError(f"there is no preset {name!r}: choose one of {', '.join(files)}")
    return files[name]


def take_config(arguments: Sequence[str], names: Collection[str]) -> tuple[Path | None, list[str]]:
    """Return the YAML file that ``--config`` names, if any, and the other arguments.

    Raises:
        ValueError: if there is no such file; the packaged ones that fit ``names`` are listed.
    """
    rest = list(arguments)
    for place, argument in enumerate(rest):
        option, equals, name = argument.partition("=")
        if option != "--config":
            continue
        del rest[place]
        if not equals:
            name = rest.pop(place) if place < len(rest) else ""
        for path in (Path(name), CONFIGS / f"{name}.yaml"):
            if path.is_file():
                return path, rest
        known = ", ".join(packaged(names))
        raise ValueError(f"--config needs a file or a packaged name ({known}), got {name!r}")
    return None, rest


# --- options


def parse(
    kind: type[T],
    description: str | None = None,
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
) -> T:
    """Make an object of the dataclass ``kind`` from the command line.

    Args:
        description: what ``--help`` says first; default: the docstring of the class.
        arguments: default: the command line's.
        prog: the command's name in ``--help``; default: the program's file name.

    Raises:
        ValueError: for a config file that is missing, damaged or has unknown keys, an unknown
            preset, an option that is unknown, given twice or has a value that it does not take, and
            what the method ``check`` of the class refuses, if any.
        SystemExit: with code 2, after one box on stderr, if an option that is needed is absent.
    """
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in _names(kind)}
    given = _read_arguments(hints, arguments)
    parsed = _run_tyro(kind, given, description or kind.__doc__, prog, hints)
    # not in __post_init__: tyro would put the sentence into a box of its own
    check = getattr(parsed, "check", None)
    if check is not None:
        check()
    return parsed


def parse_groups(
    kinds: Sequence[type],
    groups: Mapping[str, str],
    description: str,
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
) -> list[Any]:
    """Make one object of each dataclass in ``kinds`` from the options of all of them.

    ``--help`` shows the fields whose metadata names a group, group by group; all others are
    accepted too.  ``__post_init__`` may raise ValueError: it runs once, on the complete values.

    Args:
        groups: headings, by the names of groups.
    """
    members: dict[str, Field[Any]] = {}
    hints: dict[str, Any] = {}
    for kind in kinds:
        of_kind = get_type_hints(kind)
        for member in fields(kind):
            if member.init:
                members[member.name] = member
                hints[member.name] = _plain(of_kind[member.name])
    given = _read_arguments(hints, arguments)
    used = {_field(argument) for argument in given if argument.startswith("--")}
    form = []
    for group, heading in {**groups, OTHERS: "Options of trl."}.items():
        listed = [of for of in members.values() if of.metadata.get("group", OTHERS) == group]
        if group == OTHERS:
            listed = [of for of in listed if of.name in used]
        inner = make_dataclass(group, [_entry(of, hints[of.name]) for of in listed])
        inner.__doc__ = heading
        if listed:
            form.append((group, inner, field(default_factory=inner)))
    parsed: Any = _run_tyro(make_dataclass("Options", form), given, description, prog, hints)
    values: dict[str, Any] = {}
    for group in vars(parsed).values():
        values |= vars(group)
    return [
        kind(**{name: value for name, value in values.items() if name in _names(kind)})
        for kind in kinds
    ]


def parse_command(prog: str, kinds: Mapping[str, type], description: str) -> Any:
    """Make an object of the dataclass that the first argument of the command line names.

    Errors as of :func:`parse`.
    """
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        names = ", ".join(kinds)
        print(f"{description.strip()}\n\n{prog} COMMAND --help shows the options of {names}.")
        sys.exit(0)
    if given[0] not in kinds:
        raise ValueError(f"there is no command {given[0]!r}: choose one of {', '.join(kinds)}")
    return parse(kinds[given[0]], arguments=given[1:], prog=f"{prog} {given[0]}")


def _run_tyro(
    kind: type[T], given: list[str], text: str | None, prog: str | None, names: Collection[str]
) -> T:
    text = (text or "").strip()
    if {"-h", "--help"} & set(given):
        configs = ", ".join(packaged(names))
        text += CONFIG_HELP.format(what=f"FILE (or packaged: {configs})" if configs else "FILE")
    prog = prog or Path(sys.argv[0]).name
    omit = (tyro.conf.OmitArgPrefixes,)
    return tyro.cli(kind, args=given, description=text, prog=prog, config=omit)


def _entry(member: Field[Any], hint: Any) -> tuple[str, Any, Any]:
    """Return a field for ``make_dataclass`` with the name, help and default of ``member``."""
    hint = Annotated[hint, tyro.conf.arg(help=member.metadata.get("help", ""))]
    if callable(member.default_factory):
        return member.name, hint, field(default_factory=member.default_factory)
    return member.name, hint, field(default=member.default)


def _plain(hint: Any) -> Any:
    """Return the type that a command line can give: trl takes dictionaries as JSON text."""
    parts = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in get_args(hint) if part is not types.NoneType]
    single = parts[0] in (bool, int, float, str) or get_origin(parts[0]) in (list, Literal)
    return hint if len(parts) == 1 and single else str | None


def _read_arguments(hints: Mapping[str, Any], arguments: Sequence[str] | None) -> list[str]:
    """Return the arguments with those of ``--config`` and ``--preset`` before them, all checked."""
    file, given = take_config(sys.argv[1:] if arguments is None else arguments, hints)
    _check_names(given, hints)
    values = {} if file is None else _read_values(file, f"--config {file}", hints)
    preset = _value_of("preset", given) or values.get("preset")
    if preset is not None and "preset" in hints:
        values = _read_values(preset_file(preset), f"--preset {preset}", hints) | values
    overridden = {_field(argument) for argument in given}
    found = _with_truth_values(hints, [*_as_arguments(values, overridden), *given])
    for argument, following in pairwise([*found, ""]):
        if argument.startswith("--"):
            _check_value(argument, following, hints.get(_field(argument)))
    return found


def _field(option: str) -> str:
    return option.removeprefix("--").removeprefix("no-").partition("=")[0].replace("-", "_")


def _names(kind: Any) -> set[str]:
    return {member.name for member in fields(kind)}


def _check_names(given: Sequence[str], hints: Mapping[str, Any]) -> None:
    """Refuse options that are unknown, and lists that are given twice, which would lose values.

    Of other options the last one counts.
    """
    seen: set[str] = set()
    for argument in given:
        name = _field(argument)
        if not argument.startswith("--") or argument == "--help":
            continue
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean --{near[0].replace('_', '-')}?" if near else "see --help"
            raise ValueError(f"unknown option {argument.partition('=')[0]}: {hint}")
        if name in seen and _is_list(hints[name]):
            raise ValueError(
                f"--{name.replace('_', '-')} is given twice: give it once, several values after "
                "one name"
            )
        seen.add(name)


def _is_list(hint: Any) -> bool:
    return any(get_origin(part) in (list, tuple) for part in (hint, *get_args(hint)))


def _check_value(argument: str, following: str, hint: Any) -> None:
    """Refuse in one sentence what tyro would refuse in a box."""
    option, equals, value = argument.partition("=")
    given = value if equals else following
    if get_origin(hint) is Literal and given not in get_args(hint):
        choices = ", ".join(get_args(hint))
        raise ValueError(f"unknown {option} {given!r}: choose one of {choices}")
    for kind, what in ((int, "a whole number"), (float, "a number")):
        if hint in (kind, kind | None) and not (given == "None" and hint is not kind):
            try:
                kind(given)
            except ValueError:
                raise ValueError(f"{option} needs {what}, got {given!r}") from None


def _with_truth_values(hints: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """Write options that are true or false as tyro reads them; 0.1 had ``--resume false``.

    Those that need not be given take a value, all others are ``--name`` or ``--no-name``.
    """
    found: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        hint = hints.get(_field(argument)) if argument.startswith("--") else None
        if hint not in (bool, bool | None):
            found.append(argument)
            continue
        option, equals, text = argument.partition("=")
        if not equals and rest and rest[0].lower() in YES | NO:
            text = rest.pop(0)
        name = _field(option).replace("_", "-")
        if text and text.lower() not in YES | NO:
            raise ValueError(f"{option} is on or off: write --{name} or --no-{name}")
        value = option.startswith("--no-") == (text.lower() in NO)
        written = f"--{name}" if value else f"--no-{name}"
        if text and hint is bool:
            print(
                f"note: {option} {text} is now {written}; the next release takes that form only",
                file=sys.stderr,
            )
        found += [f"--{name}", str(value)] if hint is not bool else [written]
    return found


def _value_of(name: str, given: Sequence[str]) -> str | None:
    """Return what the command line has for an option."""
    found = None
    for argument, following in pairwise([*given, ""]):
        option, equals, value = argument.partition("=")
        if option == f"--{name}":
            found = value if equals else following
    return found


def _read_values(path: Path, what: str, names: Collection[str]) -> dict[str, Any]:
    """Read the values of a YAML file by the names of fields; ``what`` names it in errors."""
    values = read_config(path)
    unknown = sorted(values.keys() - set(names))
    if unknown:
        raise ValueError(f"{what} has unknown keys {', '.join(unknown)}: --help lists all names")
    return values


def _as_arguments(values: Mapping[str, Any], overridden: Collection[str]) -> list[str]:
    """Write ``values`` as options, without those that the command line has itself."""
    arguments: list[str] = []
    for key, value in values.items():
        option = key.replace("_", "-")
        if value is None or key in overridden:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, dict):
            arguments += [f"--{option}", json.dumps(value)]
        else:
            arguments += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return arguments


# --- how a command ends

USER_ERROR = 2
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE: what shells expect
VERBOSE = "RLKV_VERBOSE"
# the user's, also of a stream without a name
DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS)
# Libraries read these when they are imported, and child processes inherit them.  What the user has
# set stays.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
    "WANDB_SILENT": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logs, bars and warnings of other libraries.

    ``UserWarning`` of this package are one line each.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if "transformers" in sys.modules:  # too late for its variables
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    show = warnings.showwarning
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"rlkv\.|__main__")
        warnings.showwarning = lambda message, *_, **__: print(
            "warning:", *str(message).split(), file=sys.stderr
        )
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            warnings.showwarning = show
            logging.disable(disabled)


def _message(error: ValueError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the output'}: {error.strerror or error}"
    return " ".join(str(error).split()) or type(error).__name__


def _reader_left() -> bool:
    """Return whether the reader of our output has stopped, as in ``rlkv-infer --help | head``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _leave_stdout() -> None:
    """Send what is still in the buffer of stdout nowhere."""
    with suppress(io.UnsupportedOperation):  # a stream without file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(error: ValueError | OSError) -> NoReturn:
    if os.environ.get("RLKV_TRACEBACK"):
        raise error
    print(f"error: {_message(error)}", file=sys.stderr)
    sys.exit(USER_ERROR)


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run a program's ``main`` and exit with its code.

    ``main`` imports heavy libraries itself, so that they are quiet.

    A ``ValueError``, or an ``OSError`` that names a file (absent, not writable) or says that a disk
    is full, is printed as ``error: ...`` and exits with 2; Ctrl-C exits with 130; anything else is
    a bug and keeps its traceback.
    """
    if "--verbose" in sys.argv:
        sys.argv.remove("--verbose")
        os.environ[VERBOSE] = "1"
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # whatever the locale, as stderr does
        with nullcontext() if os.environ.get(VERBOSE) else quiet():
            app()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        if not _reader_left():
            raise
        _leave_stdout()
        sys.exit(BROKEN_PIPE)
    except OSError as error:
        if error.filename is None:
            if error.errno not in DISK_ERRORS:
                raise
            _leave_stdout()
        _refuse(error)
    except ValueError as error:
        _refuse(error)
    sys.exit(0)
