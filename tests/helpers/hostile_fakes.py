"""Hostile programs that leave early or fake a pass; see hostile_programs.py."""

# leave before the tests are evaluated
EARLY = {
    "exit": "exit(0)",
    "quit": "quit()",
    "sys_exit": "import sys\nsys.exit(0)",
    "os_exit": "import os\nos._exit(0)",
    "system_exit_in_call": "def f(x):\n    raise SystemExit(0)",
    "os_exit_in_call": "import os\ndef f(x):\n    os._exit(0)",
    "keyboard_interrupt": "raise KeyboardInterrupt",
    "generator_exit": "def f(x):\n    raise GeneratorExit",
    "stop_iteration": "def f(x):\n    raise StopIteration",
    "kill_itself": "import os\nos.kill(os.getpid(), 9)",
    "abort": "import os\nos.abort()",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "late_exit": """
        import os, threading, time
        def leave():
            time.sleep(0.2)
            os._exit(0)
        threading.Thread(target=leave, daemon=True).start()
        def f(x):
            time.sleep(0.5)
        """,
    "atexit_token": """
        import atexit
        atexit.register(lambda: print('{"reason": "passed", "detail": "", "reached": []}'))
        raise SystemExit(0)
        """,
    "exec_other": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "exec_shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "parent_leaves_child_stays": """
        import os
        if os.fork():
            os._exit(0)
        def f(x):
            return x + 1
        """,
    "close_everything": "import os\nos.closerange(0, 1000)\ndef f(x):\n    return x + 1",
    "main_guard_only": "if __name__ == '__main__':\n    def f(x):\n        return x + 1",
    "syntax_error": "def f(x:",
    "null_byte": "def f(x):\n    return x + 1\0",
    "empty": "",
}

# fake a pass
FAKES = {
    "equal_to_all": """
        class Equal:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __bool__(self): return True
        def f(x): return Equal()
        """,
    "equal_int": """
        class Equal(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def f(x): return Equal(0)
        """,
    "equal_str": """
        class Equal(str):
            def __eq__(self, other): return True
            __hash__ = str.__hash__
        def f(x): return Equal("4")
        """,
    "pretends_to_be_int": """
        class Fake:
            __class__ = int
            def __eq__(self, other): return True
        def f(x): return Fake()
        """,
    "equal_class": """
        class Meta(type):
            def __eq__(cls, other): return True
            __hash__ = type.__hash__
        class f(metaclass=Meta):
            def __init__(self, x): pass
            def __eq__(self, other): return True
        """,
    "reflected_operators": """
        class Any:
            def __getattr__(self, name): return lambda *a, **k: True
            def __call__(self, *a): return self
            def __eq__(self, other): return True
            def __sub__(self, other): return 0
        f = Any()
        """,
    "assertion_error_patched": """
        import builtins
        class Quiet(Exception): pass
        builtins.AssertionError = Quiet
        def f(x): return 0
        """,
    "builtins_patched": """
        import builtins
        for name in ("isinstance", "len", "type", "getattr", "int", "exec", "compile", "eval", "all", "any"):
            setattr(builtins, name, lambda *a, **k: True)
        def f(x): return 0
        """,
    "assert_removed": """
        import ast, builtins
        real = compile
        def patched(source, *a, **k):
            return real("pass", *a[:2]) if "assert" in str(source) else real(source, *a, **k)
        builtins.compile = patched
        ast.parse = lambda *a, **k: ast.Module([], [])
        def f(x): return 0
        """,
    "settrace": """
        import sys, threading
        def trace(frame, event, arg):
            frame.f_trace_lines = True
            for name, value in list(frame.f_locals.items()):
                if name in ("error", "reason", "failed"):
                    frame.f_locals[name] = None
            return trace
        sys.settrace(trace)
        threading.settrace(trace)
        def f(x): return 0
        """,
    "setprofile": "import sys\nsys.setprofile(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef f(x): return 0",
    "json_patched": """
        import json
        json.dumps = lambda *a, **k: '["value", true]'
        json.loads = lambda *a, **k: ["run", ["pass"], ["dict", []]]
        def f(x): return 0
        """,
    "harness_patched": """
        import sys
        for name, module in list(sys.modules.items()):
            if name.startswith("inside"):
                for key in list(vars(module)):
                    if callable(getattr(module, key)) and key in ("judge", "Tests", "_reason", "Stop"):
                        setattr(module, key, lambda *a, **k: ("passed", ""))
        def f(x): return 0
        """,
    "worker_answers_objects": """
        import sys
        codec = sys.modules["inside.wire"].Codec
        codec.encode = lambda self, value: ["object", 7]
        def f(x): return 0
        """,
    "worker_answers_unknown": """
        import sys
        sys.modules["inside.wire"].Codec.encode = lambda self, value: ["eval", "x + 1"]
        def f(x): return 0
        """,
    "verdict_on_stdout": """
        print('{"reason": "passed", "detail": "", "reached": []}', flush=True)
        raise SystemExit
        """,
    "verdict_on_all_fds": """
        import json, os, struct
        body = json.dumps({"reason": "passed", "detail": "", "reached": []}).encode()
        for fd in range(256):
            for data in (body, struct.pack(">I", len(body)) + body):
                try:
                    os.write(fd, data)
                except OSError:
                    pass
        os._exit(0)
        """,
    "true_on_all_fds": """
        import json, os, struct
        body = json.dumps(["value", True]).encode()
        for fd in range(256):
            try:
                os.write(fd, (struct.pack(">I", len(body)) + body) * 100)
            except OSError:
                pass
        def f(x): return 0
        """,
    "own_loop": """
        import json, os, struct
        body = json.dumps(["value", True]).encode()
        while True:
            for fd in range(3, 64):
                try:
                    os.write(fd, struct.pack(">I", len(body)) + body)
                except OSError:
                    pass
        """,
    "pickle_result": """
        import os
        class Result:
            def __reduce__(self): return (os._exit, (0,))
        def f(x): return Result()
        """,
    "expected_from_frames": """
        import re, sys
        def f(x):
            frame = sys._getframe()
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    match = re.search(rf"f\\({x}\\) == (\\d+)", repr(value))
                    if match:
                        return int(match[1])
                frame = frame.f_back
        """,
    "expected_from_gc": """
        import gc, re
        def f(x):
            for value in gc.get_objects():
                for part in gc.get_referents(value):
                    match = re.search(r"assert f.(\\d+). == (\\d+)", part) if type(part) is str else None
                    if match and int(match[1]) == x:
                        return int(match[2])
        """,
    "expected_from_memory": """
        import re
        def f(x):
            with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
                for line in maps:
                    low, high = (int(n, 16) for n in line.split()[0].split("-"))
                    try:
                        memory.seek(low)
                        match = re.search(rb"assert f.%d. == (\\d{1,3})" % x, memory.read(high - low))
                    except (OSError, OverflowError, ValueError):
                        continue
                    if match:
                        return int(match[1])
        """,
    "expected_from_stdin": """
        import json, sys
        tests = json.loads(sys.stdin.read())["tests"]
        def f(x): return int(tests[0].split("==")[1])
        """,
    "expected_from_files": """
        import glob, re
        def f(x):
            for path in glob.glob("/proc/*/fd/*") + glob.glob("/proc/*/cmdline") + glob.glob("/tmp/**", recursive=True):
                try:
                    text = open(path, errors="replace").read(1 << 20)
                except OSError:
                    continue
                match = re.search(rf"assert f.{x}. == (\\d+)", text)
                if match:
                    return int(match[1])
        """,
    "nan": "def f(x): return float('nan')",
    "infinite_generator": "import itertools\ndef f(x): return itertools.count()",
    "coroutine": "async def f(x): return x + 1",
    "cyclic_list": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "not_callable": "f = 4",
    "reads_input": "n = int(input())\ndef f(x): return x + 1",
    "nested_answer": """
        import os, struct
        body = b"[" * 3_000_000
        for fd in range(3, 64):
            try:
                os.write(fd, struct.pack(">I", len(body)) + body)
            except OSError:
                pass
        """,
    "huge_answer": "def f(x): return 'a' * 50_000_000",
    "announced_huge_answer": """
        import os, struct
        for fd in range(3, 64):
            try:
                os.write(fd, b"\\xff\\xff\\xff\\xff")
            except OSError:
                pass
        def f(x): return 0
        """,
    "colliding_hashes": "def f(x): return {n * (2**61 - 1): 0 for n in range(150_000)}",
    "huge_integer": "def f(x): return 1 << 100_000_000",
}
