"""Command lines from typed dataclasses: a YAML file sets defaults, options override them, unknown
names are refused.

The fields of a config class, with their types and the docstrings below them, are the options;
``--config`` takes the name of a packaged file or a path.  A class with a field ``preset`` takes
what neither sets from ``configs/presets/PRESET.yaml``.  What was parsed *is* what a result file
records (``dataclasses.asdict``).
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import tyro

from rlkv.utils.configs import packaged, preset_file, read_config, take_config

USER_ERROR = 2
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE: what shells expect
VERBOSE = "RLKV_VERBOSE"
DISK_ERRORS = (
    errno.ENOSPC,
    errno.EFBIG,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
)  # user's, also of a stream without name
# libraries read these when they are imported, child processes inherit them; what the user has set
# stays
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
    before = warnings.showwarning, logging.root.manager.disable
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
            warnings.showwarning = before[0]
            logging.disable(before[1])


def _message(error: ValueError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the output'}: {error.strerror or error}"
    return " ".join(str(error).split()) or type(error).__name__


def _reader_left() -> bool:
    """Whether whoever read our output has stopped, as in ``rlkv-infer --help | head``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _leave_stdout() -> None:
    """Let what is still in the buffer of stdout go nowhere."""
    with suppress(io.UnsupportedOperation):  # a stream without file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(error: ValueError | OSError) -> NoReturn:
    if os.environ.get("RLKV_TRACEBACK"):
        raise error
    print(f"error: {_message(error)}", file=sys.stderr)
    sys.exit(USER_ERROR)


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run a program's ``main`` and exit with its code; ``main`` imports heavy libraries itself, so
    that they are quiet.

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


T = TypeVar("T")
CONFIG_HELP = """

--config {what} sets defaults from YAML with these names.
--verbose shows what other libraries print as well."""


def parse(
    kind: type[T],
    description: str | None = None,
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
) -> T:
    """An object of the dataclass ``kind`` from ``arguments`` (default: the command line's).

    Args:
        description: what ``--help`` says first; default: the docstring of the class.
        prog: the command's name in ``--help``; default: the program's file name.

    Raises:
        ValueError: for a config file that is missing, damaged or has unknown keys, an unknown
            preset, an option that is given twice, a value that is not among an option's choices,
            and what the method ``check`` of the class refuses, if any.
        SystemExit: with code 2, after one box on stderr, for an unknown option or a value of the
            wrong type.
    """
    file, given = take_config(sys.argv[1:] if arguments is None else arguments, kind)
    names = Counter(_field(argument) for argument in given if argument.startswith("--"))
    twice = [field for field, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"--{twice[0].replace('_', '-')} is given twice: give it once, several values after "
            "one name"
        )
    values = {} if file is None else _read_values(kind, file, f"--config {file}")
    preset = _preset(given) or values.get("preset")
    if preset is not None and "preset" in _field_names(kind):
        values = _read_values(kind, preset_file(preset), f"--preset {preset}") | values
    from_file = _as_arguments(values, names)
    text = (description or kind.__doc__ or "").strip()
    if {"-h", "--help"} & set(given):
        configs = ", ".join(packaged(kind))
        text += CONFIG_HELP.format(what=f"FILE (or packaged: {configs})" if configs else "FILE")
    prog = prog or Path(sys.argv[0]).name
    omit = (tyro.conf.OmitArgPrefixes,)
    arguments = _with_truth_values(kind, [*from_file, *given])
    _check_choices(kind, arguments)
    parsed = tyro.cli(kind, args=arguments, description=text, prog=prog, config=omit)
    # not in __post_init__: tyro would put the sentence into a box of its own
    check = getattr(parsed, "check", None)
    if check is not None:
        check()
    return parsed


def parse_command(prog: str, kinds: Mapping[str, type], description: str) -> Any:
    """An object of the dataclass that the first argument of the command line names.

    Errors as :func:`parse`.
    """
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        print(
            f"{description.strip()}\n\n{prog} COMMAND --help shows the options of "
            f"{', '.join(kinds)}."
        )
        sys.exit(0)
    if given[0] not in kinds:
        raise ValueError(f"there is no command {given[0]!r}: choose one of {', '.join(kinds)}")
    return parse(kinds[given[0]], arguments=given[1:], prog=f"{prog} {given[0]}")


def _field(option: str) -> str:
    return option.removeprefix("--").removeprefix("no-").partition("=")[0].replace("-", "_")


def _check_choices(kind: type, arguments: Sequence[str]) -> None:
    """Refuse in one sentence what tyro would refuse in a box."""
    hints = get_type_hints(kind)
    for argument, following in pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        hint = hints.get(_field(option)) if option.startswith("--") else None
        given = value if equals else following
        if get_origin(hint) is Literal and given not in get_args(hint):
            raise ValueError(
                f"unknown {option} {given!r}: choose one of {', '.join(get_args(hint))}"
            )


def _with_truth_values(kind: type, arguments: Sequence[str]) -> list[str]:
    """``--name`` and ``--no-name`` of a field that is true, false or not given, as tyro reads them."""
    hints = get_type_hints(kind)
    optional = {name for name, hint in hints.items() if hint == bool | None}
    flags = {
        f"--{no}{name.replace('_', '-')}": (name, not no) for name in optional for no in ("", "no-")
    }
    found = []
    for argument, following in pairwise([*arguments, ""]):
        name, value = flags.get(argument, ("", False))
        named = name and following not in ("True", "False")
        found += [f"--{name.replace('_', '-')}", str(value)] if named else [argument]
    return found


def _preset(given: Sequence[str]) -> str | None:
    """What the command line has for ``--preset``."""
    for argument, following in pairwise([*given, ""]):
        option, equals, value = argument.partition("=")
        if option == "--preset":
            return value if equals else following
    return None


def _field_names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _read_values(kind: Any, path: Path, what: str) -> dict[str, Any]:
    """The values of a YAML file by the names of fields; ``what`` names it in errors."""
    values = read_config(path)
    unknown = sorted(values.keys() - _field_names(kind))
    if unknown:
        raise ValueError(f"{what} has unknown keys {', '.join(unknown)}: --help lists all names")
    return values


def _as_arguments(values: Mapping[str, Any], overridden: Container[str]) -> list[str]:
    """``values`` as options, without those that the command line has itself."""
    arguments: list[str] = []
    for key, value in values.items():
        option = key.replace("_", "-")
        if value is None or key in overridden:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return arguments
