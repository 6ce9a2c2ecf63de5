"""The untrusted process: shut itself in, run the program, then answer the judge's calls.

It holds no secret.

Plain data travels as JSON. Values are rebuilt as exact types: an object with its own ``__eq__``
never arrives, and subclasses lose their type (``Counter`` becomes ``dict``). Other objects stay
here; the judge knows them by a number.
"""

import atexit
import ctypes
import functools
import json
import operator
import os
import resource
import signal
import struct
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any, NoReturn

# prctl(2)
PDEATHSIG = 1
DUMPABLE = 4
SECCOMP = 22
NO_NEW_PRIVS = 38
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The system calls of a program that computes, reads and writes files, waits, and has threads: name,
# number on x86_64, number on aarch64 if there is one. All others are refused: signals, System V
# IPC, message queues, keys, owners, modes, times and attributes of files, priorities, processes,
# sockets, and what a kernel will have one day.
ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 lseek:8:62 close:3:57
close_range:436:436 dup:32:23 dup2:33 dup3:292:24 pipe:22 pipe2:293:59 sendfile:40:71
copy_file_range:326:285 ftruncate:77:46 fsync:74:82 fdatasync:75:83 mmap:9:222 munmap:11:215
mprotect:10:226 mremap:25:216 madvise:28:233 brk:12:214 msync:26:227 futex:202:98
set_robust_list:273:99 rseq:334:293 exit:60:93 exit_group:231:94 sched_yield:24:124
sched_getaffinity:204:123 wait4:61:260 creat:85 access:21 faccessat:269:48 faccessat2:439:439 stat:4
fstat:5:80 lstat:6 newfstatat:262:79 statx:332:291 readlink:89 readlinkat:267:78 getcwd:79:17
chdir:80:49 fchdir:81:50 getdents64:217:61 mkdir:83 mkdirat:258:34 rmdir:84 unlink:87
unlinkat:263:35 rename:82 renameat:264:38 renameat2:316:276 link:86 linkat:265:37 symlink:88
symlinkat:266:36 umask:95:166 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sigaltstack:131:132 pause:34
alarm:37 setitimer:38:103 getitimer:36:102 restart_syscall:219:128 nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201
times:100:153 getrusage:98:165 getcpu:309:168 sysinfo:99:179 uname:63:160 getrandom:318:278
getpid:39:172 gettid:186:178 getppid:110:173 getpgid:121:155 getpgrp:111 getsid:124:156
getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148
getresgid:120:150 select:23 pselect6:270:72 poll:7 ppoll:271:73 epoll_create:213
epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232 epoll_pwait:281:22 eventfd:284 eventfd2:290:19
sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockopt:55:209
setsockopt:54:208 getsockname:51:204 getpeername:52:205
"""
THREAD = 0x10000
TRUNCATE = 0x200
WORD = 0xFFFFFFFF
# older Landlock lets a file that is opened for reading be truncated
OPENED = (0, 1, 2, TRUNCATE | 1, TRUNCATE | 2)
# Allowed where an argument, cut to a mask, has one of these values: (argument, mask, values)
WITH_ARGUMENTS: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {
    "clone:56:220": [(0, THREAD, (THREAD,))],
    "open:2": [(1, TRUNCATE | 3, OPENED)],
    "openat:257:56": [(2, TRUNCATE | 3, OPENED)],
    # copies, flags and locks; not owners and signals
    "fcntl:72:25": [(1, WORD, (0, 1, 2, 3, 4, 5, 6, 7, 1030))],
    # what isatty and asyncio ask
    "ioctl:16:29": [(1, WORD, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451))],
    "prctl:157:167": [(0, WORD, (15, 16))],  # names of threads
    # the own limits, which cannot be raised: programs ask for a larger stack
    "prlimit64:302:261": [(0, WORD, (0,))],
    # a stream: datagrams could be sent to other sockets
    "socketpair:53:199": [(0, WORD, (1,)), (1, 0xF, (1,))],
}
NEWER_CALLS = 435  # do not exist, so that the C library takes the older ones

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library; OSError where it returns -1."""
    passed = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    result = int(getattr(_libc, name)(*passed))
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def isolate(
    folder: str, readable: list[str], devices: list[str], landlock: int, limits: dict[str, int]
) -> int:
    """Shut this process in for good; OSError if the kernel refuses.

    Args:
        folder: the only place for files.
        readable: what may be read besides.
        devices: what may be read and written besides.
        landlock: the newest version of Landlock to use; 0: none, since bubblewrap has hidden all
            other files.

    Returns:
        The version of Landlock that was used.
    """
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    bounds = {
        "CORE": 0,
        "AS": limits["memory_bytes"],
        "FSIZE": limits["file_bytes"],
        "NOFILE": limits["open_files"],
    }
    for name, value in bounds.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    # SIGXCPU first, which tells the judge why; SIGKILL for a program that handles it
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    version = _restrict_files(readable, [folder, *devices], landlock) if landlock else 0
    filter_calls()
    return version


def _restrict_files(readable: list[str], own: list[str], newest: int) -> int:
    """Let only ``readable`` and ``own`` be read, only ``own`` be written, by Landlock.

    The numbers are those of userspace-api/landlock.rst in the kernel's documentation.
    """
    version = min(newest, call("syscall", 444, None, 0, 1))
    everything = (1 << min(12 + version, 15)) - 1
    network = 3 * (version >= 4)
    scopes = 3 * (version >= 6)
    read = 0b1100  # files and folders
    file_rights = 0x4007  # that exist for files
    ruleset = call("syscall", 444, struct.pack("3Q", everything, network, scopes), 24, 0)
    for path in filter(os.path.exists, [*readable, *own]):
        rights = everything if path in own else read
        rule = rights if os.path.isdir(path) else rights & everything & file_rights
        call("syscall", 445, ruleset, 1, struct.pack("=Qi", rule, os.open(path, os.O_PATH)), 0)
    call("syscall", 446, ruleset, 0)
    return version


def filter_calls() -> None:
    """Allow ``ALLOWED`` and ``WITH_ARGUMENTS`` and no other system call from now on (seccomp)."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(
            f"no filter of system calls for {machine}: only for {' and '.join(ARCHITECTURES)}"
        )
    # instructions of the filter's machine (linux/filter.h)
    load = 0x20
    equal = 0x15
    at_least = 0x35
    mask = 0x54
    allow = (0x06, 0, 0, 0x7FFF0000)
    refuse = (0x06, 0, 0, 0x50001)
    not_there = (0x06, 0, 0, 0x50026)
    steps = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), refuse, (load, 0, 0, 0)]
    column = list(ARCHITECTURES).index(machine) + 1
    for entry in [*ALLOWED.split(), *WITH_ARGUMENTS]:
        numbers = entry.split(":")
        if column >= len(numbers):
            continue
        checks: list[tuple[int, int, int, int]] = []
        for argument, bits, values in WITH_ARGUMENTS.get(entry, []):
            checks += [(load, 0, 0, 16 + 8 * argument), (mask, 0, 0, bits)]
            checks += [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
            checks.append(refuse)
        steps += [(equal, 0, len(checks) + 1, int(numbers[column])), *checks, allow]
    steps += [(at_least, 0, 1, NEWER_CALLS), not_there, refuse]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    call("prctl", SECCOMP, 2, struct.pack("HP", len(steps), ctypes.addressof(code)), 0, 0)


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
    """Return ``[type, text or items]``, for JSON; TypeError for other than plain data."""
    for kind in type(value).__mro__:
        if kind in KINDS:
            content = KINDS[kind][0](value)
            if type(content) is not str:
                content = [encode(item) for item in content]
            return [kind.__name__, content]
    raise TypeError(f"a test passes {type(value).__name__} to the program: use plain data")


def decode(form: list[Any]) -> Any:
    """Return the value; ValueError, TypeError, KeyError or RecursionError if there is none."""
    name, content = form
    return READERS[name](content if type(content) is str else [decode(item) for item in content])


def run(module: types.ModuleType, source: str, stdin: str | None) -> None:
    """Execute ``source`` as ``module``.

    With a text for standard input as ``__main__``: then only its ``output`` is in ``module``.
    """
    if stdin is None:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(exit=sys.exit, quit=sys.exit)  # which the module site defines, else
    with open("stdin", "w+b") as given, open("stdout", "w+b") as written:
        given.write(stdin.encode())
        given.seek(0)
        # files, not objects in their place: programs open(0) and write to 1, too
        os.dup2(given.fileno(), 0)
        os.dup2(written.fileno(), 1)
        with open(0, closefd=False) as sys.stdin, open(1, "w", closefd=False) as sys.stdout:
            with suppress(SystemExit):
                exec(compile(source, "solution.py", "exec"), main.__dict__)
            # as Python ends a program: threads that it waits for, then what was left to the end
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            # it may be another now, or none
            if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
                sys.stdout.flush()
        written.seek(0)
        module.__dict__["output"] = written.read().decode(errors="replace")


def main() -> NoReturn:
    """Report the isolation, then answer requests.

    An answer is ``("value", v)`` or ``("error", exception, message)``.
    """
    options = json.loads(sys.argv[2])
    requests = os.dup(0)
    replies = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    version = isolate(**options)
    os.dup2(null, 2)  # not before: errors of the isolation go to the evaluator
    objects: dict[int, Any] = {}
    KINDS[object] = (lambda value: str(id(objects.setdefault(id(value), value))), str)
    READERS["Remote"] = lambda number: objects[int(number)]
    # not __main__: code under ``if __name__ == "__main__"`` does not run, as in the usual harnesses
    module = sys.modules["solution"] = types.ModuleType("solution")
    operations: dict[str, Callable[..., Any]] = {
        "run": functools.partial(run, module),
        "get": module.__dict__.__getitem__,
        "iter": lambda iterable: list(islice(iterable, 1_000_000)),
    }
    for function in (operator.call, operator.getitem, getattr, setattr, len, bool, str, repr):
        operations[function.__name__] = function
    with os.fdopen(requests) as lines, os.fdopen(replies, "w", buffering=1) as answers:
        answers.write(json.dumps(version) + "\n")
        for line in lines:
            try:
                operation, args, kwargs = decode(json.loads(line))
                answer = encode(("value", operations[operation](*args, **kwargs)))
            except Exception as error:  # SystemExit ends the worker: leaving early is not passing
                answer = encode(("error", type(error).__name__, str(error)[:200]))
            answers.write(json.dumps(answer) + "\n")
    os._exit(0)
