"""The judge: evaluates the tests, with the genuine builtins, and writes the verdict."""

import builtins
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from . import isolation, worker


def main() -> NoReturn:
    """Start the worker, write what its isolation lacks, read the job, write the verdict; end by SIGALRM if too late."""
    folder, limits = sys.argv[2], json.loads(sys.argv[3])
    os.chdir(folder)
    isolation.call("prctl", isolation.PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.alarm(60)  # to shut the worker in, on a busy machine
    program = Program(folder, limits)  # before the tests are read: they are not in the worker's memory
    isolation.call("prctl", isolation.DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: program.end("killed", "by the end of the evaluator"))
    print(json.dumps(program.receive()), flush=True)
    signal.setitimer(signal.ITIMER_REAL, limits["wall_seconds"])
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # for hostile answers
    job = json.load(sys.stdin)
    program.nonce = job["nonce"]
    try:
        program.ask("run", job["program"], job["stdin"])
        program.where, program.tests = "setup", job["setup"]
        exec(job["setup"], program)
        for where, test in job["tests"].items():
            program.evaluate(where, test)
        program.ask("len", "")  # it has not left
    except BaseException as error:
        reason = "failed" if isinstance(error, AssertionError) else "memory" if type(error) is MemoryError else "error"
        program.end(reason, f"{program.where}: {type(error).__name__}: {error}")
    program.end("passed", "")


class Program(dict[str, Any]):
    """The program in the worker, and the tests' names: their own, then modules and builtins, then the program's."""

    def __init__(self, folder: str, limits: dict[str, Any]) -> None:
        super().__init__(__name__="tests")
        self.folder, self.cpu_seconds, self.nonce = folder, limits["cpu_seconds"], ""
        self.where, self.tests, self.used, self.shadowed = "program", "", "", False
        (requests, to_worker), (from_worker, replies) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            worker.work(requests, replies, folder, limits)
        os.close(replies)
        self.requests, self.answers = os.fdopen(to_worker, "w", buffering=1), os.fdopen(from_worker)
        Remote._ask = self.ask

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Plain data or ``Remote``; an exception of the program is raised as the builtin of its name, if any."""
        self.requests.write(json.dumps(worker.encode((operation, args, kwargs))) + "\n")
        kind, *content = worker.decode(self.receive())
        if kind == "value":
            return content[0]
        name, message = map(str, content)
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, UnicodeError):
            raise known(message)
        raise Exception(f"{name}: {message}")

    def receive(self) -> Any:
        """The worker's next line; the end of the run if there is none."""
        if line := self.answers.readline():
            return json.loads(line)
        status, usage = os.wait4(self.pid, 0)[1:]
        code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        # the account of a process that reached its limit may stay some ms below it
        reason = "timeout" if seconds > 0.9 * self.cpu_seconds else "killed" if code < 0 else "exit"
        self.end(reason, f"the program ended with {code} after {seconds:.1f} s of CPU time")

    def end(self, reason: str, detail: str) -> NoReturn:
        """Leave nothing behind, write the verdict and end this process: no test can catch this."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", self.folder)
        print("\n" + json.dumps([self.nonce, reason, detail[:200]]), flush=True)
        os._exit(0)

    def evaluate(self, where: str, test: str) -> None:
        """Run one test. If it names only builtins, the program's function has the name of one (MBPP 126: sum)."""
        code = compile(test, where, "exec")
        self.where, self.tests, self.used = where, self.tests + test, ""
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
    """An object of the program: it can be called and read, never compared (its own ``__eq__`` may say anything)."""

    _ask: Callable[..., Any]

    def __init__(self, number: str) -> None:
        object.__setattr__(self, "_number", number)

    def __eq__(self, other: object) -> bool:
        raise TypeError("a test compares an object of the program that is not plain data")

    def __iter__(self) -> Iterator[Any]:
        return iter(Remote._ask("iter", self))


for _name in ("call", "getattr", "setattr", "getitem", "len", "bool", "str", "repr"):
    setattr(Remote, f"__{_name}__", lambda *args, _name=_name, **kwargs: Remote._ask(_name, *args, **kwargs))
worker.KINDS[Remote] = (lambda remote: remote.__dict__["_number"], Remote)
worker.READERS["object"] = Remote
