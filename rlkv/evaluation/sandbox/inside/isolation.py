"""Shuts the worker in: resource limits, no capabilities, Landlock, and a filter of system calls."""

import ctypes
import os
import resource
import signal
import struct
import sys
from contextlib import suppress

PDEATHSIG, DUMPABLE, SECCOMP, NO_NEW_PRIVS = 1, 4, 22, 38  # prctl(2)
# all that the program may read outside its own folder: Python's library and the shared libraries that it loads
LIBRARIES = {os.path.dirname(os.__file__), f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
LIBRARIES |= {"/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"}
ARCHITECTURES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}  # column of REFUSED; clone(2)
# numbers of refused system calls (-1: absent)
REFUSED = {
    "socket": (41, 198), "io_uring_setup": (425, 425), "fork": (57, -1), "vfork": (58, -1), "unshare": (272, 97),
    "ptrace": (101, 117), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "prlimit64": (302, 261),
    "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "memfd_create": (319, 279), "shmget": (29, 194),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "setuid": (105, 146),
}  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library; OSError where it returns -1."""
    result = int(getattr(_libc, name)(*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)))
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def isolate(folder: str, limits: dict[str, int]) -> list[str]:
    """All protections of this process, ``folder`` being its only place for files; returns what the system refuses."""
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    values = {"CORE": 0, "CPU": limits["cpu_seconds"], "AS": limits["memory_bytes"], "FSIZE": limits["file_bytes"]}
    for name, value in {**values, "NOFILE": limits["open_files"]}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    missing = ["no access to the files of this user", "no network, signals and new processes"]
    with suppress(OSError):
        _restrict_files(folder)
        missing.pop(0)
    with suppress(OSError, KeyError):
        _refuse_calls()
        missing.pop()
    if missing and os.geteuid() == 0:
        raise OSError(f"programs would run as root without protection ({missing}): evaluate code tasks as another user")
    return missing


def _restrict_files(folder: str) -> None:
    """Landlock: only ``LIBRARIES`` can be read and only ``folder`` written (userspace-api/landlock.rst)."""
    version = call("syscall", 444, None, 0, 1)
    everything, network, scopes = (1 << min(12 + version, 15)) - 1, 3 * (version >= 4), 3 * (version >= 6)
    read, file_rights = 0b1100, 0x4007  # read file, read folder; the rights that exist for files
    ruleset = call("syscall", 444, struct.pack("3Q", everything, network, scopes), 24, 0)
    for path in filter(os.path.exists, {*LIBRARIES, folder}):
        rights = everything if path in (folder, os.devnull) else read
        rule = rights if os.path.isdir(path) else rights & everything & file_rights
        call("syscall", 445, ruleset, 1, struct.pack("=Qi", rule, os.open(path, os.O_PATH)), 0)
    call("syscall", 446, ruleset, 0)


def _refuse_calls() -> None:
    """Filter system calls from now on; KeyError on machines that are not in ``ARCHITECTURES``."""
    column, architecture, clone = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, not_there = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x50001), (answer, 0, 0, 0x50026)
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse]
    steps += [(load, 0, 0, 0), (at_least, 0, 1, 1 << 30), refuse]  # x32: the same under other numbers
    for numbers in REFUSED.values():
        steps += [(equal, 0, 1, numbers[column] & 0xFFFFFFFF), refuse]
    steps += [(equal, 0, 1, 435), not_there]  # clone3: the C library then uses clone, here for threads only
    steps += [(equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 0, 1, 0x10000), allow, refuse, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    call("prctl", SECCOMP, 2, struct.pack("HP", len(steps), ctypes.addressof(code)), 0, 0)
