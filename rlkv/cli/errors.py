"""One way for every command to end: a user's mistake is one line on stderr and exit code 2, no traceback.

``RLKV_TRACEBACK=1`` in the environment keeps the traceback, for whoever looks for a bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, what shells expect


def _message(error: ValueError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}"
    return " ".join(str(error).split()) or type(error).__name__


def help_text(docstring: str | None) -> str:
    """A program's docstring for ``--help``: indented paragraphs, which are commands, keep their lines."""
    paragraphs = (docstring or "").replace("\\\\\n", "\\\n").split("\n\n")
    kept = []
    for paragraph in paragraphs:
        is_commands = all(line.startswith("    ") or not line.strip() for line in paragraph.splitlines())
        # click's mark for a paragraph that is not to be wrapped
        kept.append(f"\b\n{paragraph}" if is_commands and paragraph.strip() else paragraph)
    return "\n\n".join(kept)


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run a typer app (standalone) or a plain ``main()`` and exit with its code.

    A ``ValueError``, or an ``OSError`` that names a file (absent, not writable), is printed as ``error: ...`` and
    exits with 2; Ctrl-C exits with 130; anything else is a bug and keeps its traceback.
    """
    try:
        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        unnamed = isinstance(error, OSError) and error.filename is None
        if unnamed or os.environ.get("RLKV_TRACEBACK"):
            raise
        print(f"error: {_message(error)}", file=sys.stderr)
        sys.exit(USER_ERROR)
    sys.exit(0)
