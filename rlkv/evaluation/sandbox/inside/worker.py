"""The untrusted process: shuts itself in, runs the program, then answers the judge's calls. It holds no secret.

Plain data travels as JSON. Values are rebuilt as exact types: an object with its own ``__eq__`` never arrives, and
subclasses lose their type (``Counter`` becomes ``dict``). Other objects stay here; the judge knows them by a number.
"""

import functools
import json
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any, NoReturn

from . import isolation

# type: to a text or to items, and back; each side adds the objects of the program
KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    type(None): (repr, lambda text: None),
    bool: (repr, "True".__eq__),
    int: (hex, lambda text: int(text, 16)),  # decimal conversion is limited to 4300 digits
    range: (lambda value: (value.start, value.stop, value.step), lambda items: range(*items)),
    dict: (dict.items, dict),
    **{kind: (kind.hex, kind.fromhex) for kind in (float, bytes, bytearray)},
    **{kind: (kind.__str__, kind) for kind in (str, complex, Decimal, Fraction)},
    **{kind: (kind.isoformat, kind.fromisoformat) for kind in (datetime, date)},
    **{kind: (iter, kind) for kind in (list, tuple, set, frozenset, deque)},
}
READERS = {kind.__name__: read for kind, (_, read) in KINDS.items()}


def encode(value: Any) -> list[Any]:
    """``[type, text or items]``, for JSON; TypeError for other than plain data."""
    for kind in type(value).__mro__:
        if kind in KINDS:
            content = KINDS[kind][0](value)
            return [kind.__name__, content if type(content) is str else [encode(item) for item in content]]
    raise TypeError(f"a test passes {type(value).__name__} to the program: use plain data")


def decode(form: list[Any]) -> Any:
    """The value; ValueError, TypeError, KeyError or RecursionError if there is none."""
    name, content = form
    return READERS[name](content if type(content) is str else [decode(item) for item in content])


def run(module: types.ModuleType, source: str, stdin: str | None) -> None:
    """Execute ``source`` as ``module``, or with a text for standard input as ``__main__``: then ``output`` remains."""
    if stdin is None:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(exit=sys.exit, quit=sys.exit)  # which the module site defines, else
    with open("stdin", "w+b") as given, open("stdout", "w+b") as written:
        given.write(stdin.encode())
        given.seek(0)
        os.dup2(given.fileno(), 0)  # files, not objects in their place: programs open(0) and write to 1, too
        os.dup2(written.fileno(), 1)
        with open(0, closefd=False) as sys.stdin, open(1, "w", closefd=False) as sys.stdout:
            with suppress(SystemExit):
                exec(compile(source, "solution.py", "exec"), main.__dict__)
            sys.stdout.flush()  # it may be another now
        written.seek(0)
        module.__dict__["output"] = written.read().decode(errors="replace")


def work(requests: int, replies: int, folder: str, limits: dict[str, int]) -> NoReturn:
    """Report what the isolation lacks; answer requests with ``("value", v)`` or ``("error", exception, message)``."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    missing = isolation.isolate(folder, limits)
    os.dup2(null, 2)  # not before: errors of the isolation go to the evaluator
    objects: dict[int, Any] = {}
    KINDS[object] = (lambda value: str(id(objects.setdefault(id(value), value))), str)
    READERS["Remote"] = lambda number: objects[int(number)]
    # not __main__: code under ``if __name__ == "__main__"`` does not run, as in the usual harnesses
    module = sys.modules["solution"] = types.ModuleType("solution")
    operations = {
        "run": functools.partial(run, module),
        "get": module.__dict__.__getitem__,
        "iter": lambda iterable: list(islice(iterable, 1_000_000)),
        **{f.__name__: f for f in (operator.call, operator.getitem, getattr, setattr, len, bool, str, repr)},
    }
    with os.fdopen(requests) as lines, os.fdopen(replies, "w", buffering=1) as answers:
        answers.write(json.dumps(missing) + "\n")
        for line in lines:
            try:
                operation, args, kwargs = decode(json.loads(line))
                answer = encode(("value", operations[operation](*args, **kwargs)))
            except Exception as error:  # SystemExit ends the worker: leaving early is not passing
                answer = encode(("error", type(error).__name__, str(error)[:200]))
            answers.write(json.dumps(answer) + "\n")
    os._exit(0)
