"""How every command runs and ends: other libraries are quiet, a user's mistake is one line on stderr and exit code 2.

``--verbose`` (``RLKV_VERBOSE=1``) shows what other libraries print; ``RLKV_TRACEBACK=1`` keeps the traceback of errors.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

USER_ERROR = 2
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE: what shells expect
VERBOSE = "RLKV_VERBOSE"
DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EROFS)  # user's, also of a stream without name
# libraries read these when they are imported, child processes inherit them; what the user has set stays
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
    """Silence logs, bars and warnings of other libraries; ``UserWarning`` of this package are one line each."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if "transformers" in sys.modules:  # too late for its variables
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    before = warnings.showwarning, logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", category=UserWarning, module=r"rlkv\.|__main__")
        warnings.showwarning = lambda message, *_, **__: print("warning:", *str(message).split(), file=sys.stderr)
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
    """Run a program's ``main`` and exit with its code; ``main`` imports heavy libraries itself, so that they are quiet.

    A ``ValueError``, or an ``OSError`` that names a file (absent, not writable) or says that a disk is full, is printed
    as ``error: ...`` and exits with 2; Ctrl-C exits with 130; anything else is a bug and keeps its traceback.
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
