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
from copy import copy
from dataclasses import Field, field, fields, make_dataclass
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

from rlkv.utils.runtime import check_switches

CONFIGS = Path(__file__).resolve().parents[1] / "configs"  # a part of the package
TRUTH_VALUES = ("true", "false", "yes", "no", "on", "off", "1", "0")
T = TypeVar("T")
OTHERS = "others"  # the group of options that --help does not show


# --- config files


def packaged(names: Collection[str]) -> list[str]:
    """Return the names of the packaged configs that set nothing but options of ``names``."""
    paths = sorted(CONFIGS.glob("*.yaml"))
    return [path.stem for path in paths if read_config(path).keys() <= set(names)]


def read_config(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a YAML file; ``base: NAME`` adds what only NAME.yaml sets.

    That lies in the same folder, or is a packaged config.

    Args:
        above: the files that this one is a base of.

    Raises:
        ValueError: if the file or a base cannot be read or is not a mapping, or is its own base.
    """
    values = _read_mapping(path)
    name = values.pop("base", None)
    if name is None:
        return values
    files = (path.resolve(), *above)
    base = files[0].parent / f"{name}.yaml"
    if not base.is_file():
        base = CONFIGS / f"{name}.yaml"
    if "/" in str(name) or not base.is_file():
        raise ValueError(
            f"--config {path}: its base {name}.yaml is not in its folder, and no packaged config: "
            "write base: NAME without .yaml"
        )
    if any(base.samefile(file) for file in files):
        raise ValueError(f"--config {path}: {name}.yaml is a base of itself: take that line out")
    return read_config(base, files) | values


class _Loader(yaml.SafeLoader):
    """Refuses a name that is given twice, of which YAML's own would take the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            names = [str(key.value).replace("-", "_") for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise yaml.YAMLError(f"{name} is given twice")
        return super().construct_mapping(node, deep)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
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


def config_file(name: str, names: Collection[str]) -> Path:
    """Return the YAML file that ``--config`` names; ValueError lists the packaged ones."""
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(packaged(names))
    raise ValueError(f"--config needs a file or a packaged name ({known}), got {name!r}")


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
    names = _names(kind)
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in names}
    marked = get_type_hints(kind, include_extras=True).values()
    takes_words = any(tyro.conf.Positional in getattr(hint, "__metadata__", ()) for hint in marked)
    given = _read_arguments(hints, arguments, takes_words)
    parsed = _run_tyro(kind, given, description or kind.__doc__ or "", prog, hints)
    # not in __post_init__: tyro would put the sentence into a box of its own
    check = getattr(parsed, "check", None)
    if check is not None:
        check()
    return parsed


def parse_groups(
    kinds: Sequence[type],
    groups: Mapping[str, str],
    description: str,
    arguments: Sequence[str] | None,
    prog: str,
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
    used = _option_fields(given)
    form = []
    for group, heading in {**groups, OTHERS: "Options of trl."}.items():
        listed = []
        for name, member in members.items():
            if member.metadata.get("group", OTHERS) == group and (group != OTHERS or name in used):
                shown = tyro.conf.arg(help=member.metadata.get("help", ""))
                listed.append((name, Annotated[hints[name], shown], copy(member)))
        if listed:
            inner = make_dataclass(group, listed)
            inner.__doc__ = heading
            form.append((group, inner, field(default_factory=inner)))
    parsed: Any = _run_tyro(make_dataclass("Options", form), given, description, prog, hints)
    values: dict[str, Any] = {}
    for group in vars(parsed).values():
        values |= vars(group)
    made = []
    for kind in kinds:
        names = _names(kind)
        made.append(kind(**{name: value for name, value in values.items() if name in names}))
    return made


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
    kind: type[T], given: list[str], text: str, prog: str | None, names: Collection[str]
) -> T:
    text = text.strip()
    if {"-h", "--help"} & set(given):
        configs = ", ".join(packaged(names))
        what = f"FILE (or packaged: {configs})" if configs else "FILE"
        text += f"\n\n--config {what} sets defaults from YAML with these names.\n"
        text += "--verbose shows what other libraries print as well."
    prog = prog or Path(sys.argv[0]).name
    omit = (tyro.conf.OmitArgPrefixes,)
    return tyro.cli(kind, args=given, description=text, prog=prog, config=omit)


def _plain(hint: Any) -> Any:
    """Return the type that a command line can give: trl takes dictionaries as JSON text."""
    parts = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in get_args(hint) if part is not types.NoneType]
    single = parts[0] in (bool, int, float, str) or get_origin(parts[0]) in (list, Literal)
    return hint if len(parts) == 1 and single else str | None


def _names(kind: Any) -> set[str]:
    return {member.name for member in fields(kind)}


def _field(option: str) -> str:
    return option.removeprefix("--").removeprefix("no-").partition("=")[0].replace("-", "_")


def _option_fields(arguments: Sequence[str]) -> set[str]:
    """Return the fields of the options among ``arguments``, whose values may be named like some."""
    return {_field(argument) for argument in arguments if argument.startswith("--")}


def _read_arguments(
    hints: Mapping[str, Any], arguments: Sequence[str] | None, takes_words: bool = False
) -> list[str]:
    """Return the arguments with those of ``--config`` and ``--preset`` before them, all checked.

    takes_words: whether there are arguments without a name.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    values: dict[str, Any] = {}
    config = _take("config", given)
    if config is not None:
        values = _read_values(config_file(config, hints), f"--config {config}", hints)
    if "preset" in hints:
        preset = _take("preset", given)
        if preset is None:
            preset = values.pop("preset", None)
        if preset is not None:
            values = _read_values(preset_file(preset), f"--preset {preset}", hints) | values
            given = ["--preset", preset, *given]
    from_files = _as_arguments(values, _option_fields(given), hints)
    return _checked([*from_files, *given], hints, takes_words)


def _take(name: str, given: list[str]) -> str | None:
    """Remove an option from ``given``; return its value."""
    places = [place for place, own in enumerate(given) if own.partition("=")[0] == f"--{name}"]
    if not places:
        return None
    if len(places) > 1:
        raise ValueError(f"--{name} is given twice: give one of them")
    _, equals, value = given[places[0]].partition("=")
    found = given[places[0] : places[0] + (1 if equals else 2)]
    del given[places[0] : places[0] + len(found)]
    return _at_home(value if equals else "".join(found[1:]))


def _read_values(path: Path, what: str, names: Collection[str]) -> dict[str, Any]:
    """Read the values of a YAML file by the names of fields; ``what`` names it in errors."""
    values = read_config(path)
    unknown = sorted(values.keys() - set(names))
    if unknown:
        raise ValueError(f"{what} has unknown keys {', '.join(unknown)}: --help lists all names")
    return values


def _as_arguments(
    values: Mapping[str, Any], overridden: Collection[str], hints: Mapping[str, Any]
) -> list[str]:
    """Write ``values`` as options, without those that the command line has itself."""
    arguments: list[str] = []
    for key, value in values.items():
        option = key.replace("_", "-")
        kinds = _kinds(hints[key])
        # tyro has no word for a switch without a value
        if key in overridden or (value is None and (types.NoneType not in kinds or bool in kinds)):
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list):
            arguments += [f"--{option}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments.append(f"--{option}={text}")
    return arguments


def _at_home(argument: str, before: str = "") -> str:
    """Replace ``~/`` at the begin of a path, which no shell does in YAML and behind ``=``."""
    option, equals, value = argument.partition("=") if argument[:2] == "--" else ("", "", argument)
    is_path = value[:2] == "~/" and "--prompt" not in (option, before)
    return option + equals + (os.path.expanduser(value) if is_path else value)


def _checked(arguments: list[str], hints: Mapping[str, Any], takes_words: bool) -> list[str]:
    """Return the arguments as tyro reads them, after refusing what it would refuse in a box.

    Of an option that is given twice the last value counts, but a list would lose values.
    """
    found: list[str] = []
    seen: set[str] = set()
    rest = list(map(_at_home, arguments, ["", *arguments]))
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help") or (takes_words and not argument.startswith("--")):
            found.append(argument)
            continue
        if not argument.startswith("--"):
            raise ValueError(f"{argument!r} is no option, and the value of none: see --help")
        option, equals, text = argument.partition("=")
        name = _field(option)
        hint = hints.get(name)
        is_switch = hint in (bool, bool | None)
        if hint is not None and option.startswith("--no-") and not is_switch:
            raise ValueError(
                f"{option}: --{name.replace('_', '-')} takes a value: give one (in YAML 'no' and "
                "'off' need quotes)"
            )
        if hint is None:
            near = difflib.get_close_matches(name, hints, n=1)
            advice = f"did you mean --{near[0].replace('_', '-')}?" if near else "see --help"
            raise ValueError(f"unknown option {option}: {advice}")
        is_list = any(get_origin(part) in (list, tuple) for part in (hint, *get_args(hint)))
        if is_list and name in seen:
            raise ValueError(
                f"{option} is given twice: give it once, several values after one name"
            )
        seen.add(name)
        if is_switch:
            flag = name.replace("_", "-")
            follows = "".join(rest[:1])
            is_value = follows[:1] not in ("", "-")
            if takes_words:  # the next one may be a path
                is_value = follows.lower() in TRUTH_VALUES
            if equals or is_value:
                raise ValueError(f"{option} is on or off: write --{flag} or --no-{flag}")
            is_on = not option.startswith("--no-")
            written = f"--{flag}" if is_on else f"--no-{flag}"
            # tyro gives those that need not be given a value
            found += [written] if hint is bool else [f"--{flag}", str(is_on)]
            continue
        found.append(argument)
        if is_list and takes_words:
            continue  # tyro tells the values of the list from the words behind it
        values = [text] if equals else []
        while rest and (is_list or not values):
            if rest[0].startswith("--") or rest[0] == "-h":
                break
            values.append(rest.pop(0))
            found.append(values[-1])
        if not values and not is_list:
            raise ValueError(f"{option} needs a value: write {option}=VALUE")
        for value in values:
            _check_value(option, value, hint)
    return found


def _check_value(option: str, given: str, hint: Any) -> None:
    """Refuse in one sentence what is empty, not a choice or not a number; of lists, a part."""
    if not given.strip():
        raise ValueError(f"{option} has an empty value: give one, or leave the option out")
    kinds = _kinds(hint)
    if str in kinds or (types.NoneType in kinds and given == "None"):
        return
    choices = [str(choice) for kind in kinds for choice in get_args(kind)]
    if choices and given not in choices:
        raise ValueError(f"unknown {option} {given!r}: choose one of {', '.join(choices)}")
    for kind, what in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                kind(given)
            except ValueError:
                raise ValueError(f"{option} needs {what}, got {given!r}") from None


def _kinds(hint: Any) -> list[Any]:
    """Return the types, and choices, of which a type is put together."""
    if get_origin(hint) is Literal or not get_args(hint):
        return [hint]
    return [kind for part in get_args(hint) for kind in _kinds(part)]


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
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError):
        message = f"{error.filename or 'the output'}: {error.strerror or error}"
    print(f"error: {message}", file=sys.stderr)
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
            check_switches()
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
