"""The judge: evaluate the tests, with the genuine builtins, and write the verdict."""

import builtins
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from . import worker


def same_output(found: str, expected: str) -> bool:
    """Return whether both texts have the same lines, as in LiveCodeBench's evaluation.

    White space around lines does not count, and numbers may be written differently.
    """
    lines = found.strip().split("\n")
    wanted = expected.strip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(found: str, expected: str) -> bool:
    if found.strip() == expected.strip():
        return True
    try:
        return [*map(Decimal, found.split())] == [*map(Decimal, expected.split())]
    except InvalidOperation:
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Return whether both are equal; a tuple may stand for the list that JSON has."""
    if type(found) is tuple:
        found = list(found)
    return bool(found == expected)


def main() -> NoReturn:
    """Make the folder, start the worker, write what shuts it in, read the job, write the verdict.

    Ends by SIGALRM if too late.
    """
    options = json.loads(sys.argv[2])
    # held back until the worker runs: bubblewrap, killed while it starts, leaves a process behind
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    worker.call("prctl", worker.PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    worker.call("prctl", worker.DUMPABLE, 0, 0, 0, 0)
    os.mkdir(options["folder"], 0o700)
    os.chdir(options["folder"])
    signal.alarm(options["start_seconds"])
    program = Program(options["worker"], options["folder"])
    signal.signal(signal.SIGTERM, lambda *_: program.end("killed", "by the end of the evaluator"))
    if os.getppid() != options["evaluator"]:  # it ended before this process asked to be told
        signal.raise_signal(signal.SIGTERM)
    try:
        isolation = program.receive()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        print(json.dumps(isolation), flush=True)
        signal.setitimer(signal.ITIMER_REAL, options["wall_seconds"])
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # for hostile answers
        job = json.load(sys.stdin)  # none: the evaluator has ended, and SIGTERM is on its way
        program.nonce = job["nonce"]
        program.ask("run", job["program"], job["stdin"])
        program.where = "setup"
        program.tests = job["setup"]
        exec(job["setup"], program)
        for where, test in job["tests"].items():
            program.evaluate(where, test)
        program.ask("len", "")  # it has not left
    except BaseException as error:
        reason = "error"
        if isinstance(error, AssertionError):
            reason = "failed"
        elif type(error) is MemoryError:
            reason = "memory"
        program.end(reason, f"{program.where}: {type(error).__name__}: {error}")
    program.end("passed", "")


class Program(dict[str, Any]):
    """The program in the worker, as the names that tests see.

    Their own come first, then modules and builtins, then the program's.
    """

    def __init__(self, command: list[str], folder: str) -> None:
        super().__init__(__name__="tests")
        self.folder = folder
        self.nonce = ""
        self.where = "program"  # what is evaluated
        self.tests = ""  # its source
        self.used = ""  # the last name that was the program's
        self.shadowed = False  # whether the program may define names of builtins
        requests, to_worker = os.pipe()
        from_worker, replies = os.pipe()
        ends = [(os.POSIX_SPAWN_DUP2, requests, 0), (os.POSIX_SPAWN_DUP2, replies, 1)]
        self.pid = os.posix_spawn(command[0], command, os.environ, file_actions=ends, setsigmask=[])
        os.close(requests)
        os.close(replies)
        self.requests = os.fdopen(to_worker, "w", buffering=1)
        self.answers = os.fdopen(from_worker)
        Remote._ask = self.ask

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Return plain data or a ``Remote``; raise what the program raised, as a builtin if any."""
        self.requests.write(json.dumps(worker.encode((operation, args, kwargs))) + "\n")
        kind, *content = worker.decode(self.receive())
        if kind == "value":
            return content[0]
        name, message = map(str, content)
        known = getattr(builtins, name, None)
        if (
            isinstance(known, type)
            and issubclass(known, Exception)
            and not issubclass(known, UnicodeError)  # which takes other arguments
        ):
            raise known(message)
        raise Exception(f"{name}: {message}")

    def receive(self) -> Any:
        """Return the worker's next line; end the run if there is none."""
        if line := self.answers.readline():
            return json.loads(line)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        # bubblewrap's code for a signal is 128 + its number
        number = -code if code < 0 else max(0, code - 128)
        reason = "killed" if number else "exit"
        if number == signal.SIGXCPU:
            reason = "timeout"
        self.end(reason, f"the program ended with {code}")

    def end(self, reason: str, detail: str) -> NoReturn:
        """Leave nothing behind, write the verdict and end this process: no test can catch this."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", self.folder)
        print("\n" + json.dumps([self.nonce, reason, detail[:200]]), flush=True)
        os._exit(0)

    def evaluate(self, where: str, test: str) -> None:
        code = compile(test, where, "exec")
        self.where = where
        self.tests += test
        self.used = ""
        # a test with no other name is about a function named like a builtin (MBPP 126: sum)
        self.shadowed = {*code.co_names} <= {*dir(builtins)}
        exec(code, self)
        if not self.used:
            raise NameError("the program does not define anything that the test uses")

    def __missing__(self, name: str) -> Any:
        if name in sys.stdlib_module_names and f"{name}." in self.tests:
            return __import__(name)
        if hasattr(builtins, name) and not (self.shadowed and self.used in ("", name)):
            raise KeyError(name)
        value = self.ask("get", name)
        self.used = name
        return value


class Remote:
    """An object of the program: it can be called and read, never compared.

    Its own ``__eq__`` may say anything.
    """

    _ask: Callable[..., Any]

    def __init__(self, number: str) -> None:
        object.__setattr__(self, "_number", number)

    def __eq__(self, other: object) -> bool:
        raise TypeError("a test compares an object of the program that is not plain data")

    def __iter__(self) -> Iterator[Any]:
        return iter(Remote._ask("iter", self))


for _name in ("call", "getattr", "setattr", "getitem", "len", "bool", "str", "repr"):

    def _forward(*args: Any, _name: str = _name, **kwargs: Any) -> Any:
        return Remote._ask(_name, *args, **kwargs)

    setattr(Remote, f"__{_name}__", _forward)
worker.KINDS[Remote] = (lambda remote: remote.__dict__["_number"], Remote)
worker.READERS["object"] = Remote
