"""Pieces of the sandbox: plain data, answers of the program, system-call filter, removal of folders."""

import errno
import json
import os
import struct
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from rlkv.evaluation.sandbox.inside import removal, seccomp, wire
from rlkv.evaluation.sandbox.inside.remote import Program, ProgramError, Remote

VALUES = [
    None, True, 0, -5, 2**63, -(2**64), 1 << 20_000, -(1 << 20_000), 0.1, float("inf"), -0.0, 1 + 2j,
    "", "a\x00\ud800中", b"\x00\xff",
    bytearray(b"a"), [], [[1], (2,), {3}], (), (1, [2]), {1, "a"}, frozenset({(1, 2)}), {}, {(1, 2): [3], None: {}},
    range(1, 9, 2), Decimal("1.10"), Fraction(1, 3), date(2020, 2, 29), datetime(2020, 2, 29, 1, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    codec = wire.Codec(lambda _: pytest.fail("not plain"), lambda _: None)
    header, body = wire.pack(codec.encode(value))[:4], wire.pack(codec.encode(value))[4:]
    assert int.from_bytes(header) == len(body)
    back = codec.decode(json.loads(body))
    assert (type(back), back) == (type(value), value)


class Echo:
    """A channel that answers the same to everything."""

    def __init__(self, reply: list[object]) -> None:
        self.reply = reply

    def ask(self, request: list[object]) -> list[object]:
        return self.reply


def test_answers_of_the_program() -> None:
    remote = Program(Echo(["value", ["object", 3]])).do("get", "f")
    assert type(remote) is Remote
    for compare in (lambda: remote == 1, lambda: remote != 1, lambda: {remote}, lambda: remote < 1, lambda: remote + 1):
        with pytest.raises(TypeError):
            compare()
    with pytest.raises(KeyError):
        Program(Echo(["error", "KeyError", "a"])).do("call")
    for name in ("SystemExit", "KeyboardInterrupt", "Own", "print", "UnicodeDecodeError"):
        with pytest.raises(ProgramError, match=name):
            Program(Echo(["error", name, "a"])).do("call")
    with pytest.raises(TypeError, match="function"):
        Program(Echo(["value", 1])).do("call", lambda: 1)


def test_any_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("")
    (folder / "link").symlink_to("/")
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(1100):  # deeper than paths may be long and than calls may be nested
        os.mkdir("deep")
        os.chdir("deep")
    os.chdir(here)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    removal.remove_folder(str(folder))
    assert list(tmp_path.iterdir()) == []


def decide(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What the kernel would do with a call: a reading of BPF as in Documentation/networking/filter.rst."""
    data = struct.pack("IIQQ", number, architecture, 0, argument)
    steps, position, register = list(struct.iter_unpack("HBBI", program)), 0, 0
    tests = {
        seccomp.EQUAL: lambda a, b: a == b,
        seccomp.AT_LEAST: lambda a, b: a >= b,
        seccomp.ANY_BIT: lambda a, b: a & b != 0,
    }
    while True:
        code, if_true, if_false, operand = steps[position]
        position += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            register = struct.unpack_from("I", data, operand)[0]
        else:
            position += if_true if tests[code](register, operand) else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("private_files", [True, False])
def test_filter(machine: str, private_files: bool) -> None:
    architecture, column = seccomp.ARCHITECTURES[machine], list(seccomp.ARCHITECTURES).index(machine)
    allowed, refused = seccomp.ALLOW, seccomp.REFUSE
    assert refused & 0xFFFF == errno.EPERM
    own, free = (seccomp.filter_program(machine, pid, private_files) for pid in (77, None))
    assert len(own) // 8 < 4096  # the kernel's limit
    for numbers in seccomp.REFUSED.values():
        assert decide(own, architecture, numbers[column]) == refused
    for numbers in seccomp.ATTRIBUTES.values():
        if numbers[column] >= 0:
            assert decide(own, architecture, numbers[column]) == (allowed if private_files else refused)
    for numbers in seccomp.SIGNALS.values():
        number = numbers[column]
        assert [decide(own, architecture, number, pid) for pid in (77, 78, 0, 2**32 - 1)] == [allowed] + [refused] * 3
        assert decide(free, architecture, number, 78) == allowed
    for numbers in seccomp.ON_ITSELF_ONLY.values():
        assert [decide(own, architecture, numbers[column], pid) for pid in (0, 77)] == [allowed, refused]
    threads, user_namespace = 0x3D0F00, 0x10000000
    clone = seccomp.CLONE[column]
    assert [decide(own, architecture, clone, flags) for flags in (threads, user_namespace)] == [allowed, refused]
    assert decide(own, architecture, seccomp.CLONE3[column]) == seccomp.NOT_THERE
    read, write, exit_group = [(0, 63), (1, 64), (231, 94)]
    for numbers in (read, write, exit_group):
        assert decide(own, architecture, numbers[column]) == allowed
        assert decide(own, 0x40000003, numbers[column]) == refused  # 32-bit calls have other numbers


def test_other_names_of_calls_are_refused() -> None:
    program = seccomp.filter_program("x86_64", None, True)
    assert decide(program, seccomp.ARCHITECTURES["x86_64"], 0x40000000 | 41) == seccomp.REFUSE
    with pytest.raises(KeyError):
        seccomp.filter_program("riscv64", None, True)
