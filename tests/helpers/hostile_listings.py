"""The hostile programs that need several lines, each below its name; see ``hostile_programs``."""

_SOURCE = r"""
## early:late_exit
import os, threading, time
def leave(): time.sleep(0.2); os._exit(0)
threading.Thread(target=leave, daemon=True).start()
def f(x): time.sleep(0.5)
## early:atexit_token
import atexit
atexit.register(lambda: print('["", "passed", ""]'))
raise SystemExit(0)
## fake:equal_to_all
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
def f(x): return Equal()
## fake:equal_int
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Equal(0)
## fake:equal_str
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def f(x): return Equal("4")
## fake:pretends_to_be_int
class Fake:
    __class__ = int
    def __eq__(self, other): return True
def f(x): return Fake()
## fake:equal_class
class Meta(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class f(metaclass=Meta):
    def __init__(self, x): pass
    def __eq__(self, other): return True
## fake:reflected_operators
class Any:
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a): return self
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
f = Any()
## fake:assertion_error_patched
import builtins
class Quiet(Exception): pass
builtins.AssertionError = Quiet
def f(x): return 0
## fake:builtins_patched
import builtins
for name in ("isinstance", "len", "type", "getattr", "int", "exec", "compile", "eval", "all", "any"):
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return 0
## fake:assert_removed
import ast, builtins; real = compile
def patched(source, *a, **k):
    return real("pass", *a[:2]) if "assert" in str(source) else real(source, *a, **k)
builtins.compile = patched; ast.parse = lambda *a, **k: ast.Module([], [])
def f(x): return 0
## fake:settrace
import sys, threading
def trace(frame, event, arg):
    frame.f_trace_lines = True
    for name, value in list(frame.f_locals.items()):
        if name in ("error", "reason", "failed"): frame.f_locals[name] = None
    return trace
sys.settrace(trace); threading.settrace(trace)
def f(x): return 0
## fake:setprofile
import sys; sys.setprofile(lambda *a: None); sys.excepthook = lambda *a: None
def f(x): return 0
## fake:json_patched
import json; json.dumps = lambda *a, **k: '["tuple", [["str", "value"], ["bool", "True"]]]'
json.loads = lambda *a, **k: ["tuple", [["str", "run"], ["tuple", [["str", "pass"]]], ["dict", []]]]
def f(x): return 0
## fake:harness_patched
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("inside"):
        for key in list(vars(module)):
            if key in ("main", "Program", "Remote", "isolate", "call"):
                setattr(module, key, lambda *a, **k: ("passed", ""))
def f(x): return 0
## fake:worker_answers_objects
import sys; sys.modules["inside.worker"].encode = lambda value: ["tuple", [["str", "value"], ["object", "7"]]]
def f(x): return 0
## fake:worker_answers_unknown
import sys; sys.modules["inside.worker"].encode = lambda value: ["eval", "x + 1"]
def f(x): return 0
## fake:verdict_on_stdout
print('["", "passed", ""]', flush=True); raise SystemExit
## fake:verdict_on_all_fds
import os
for fd in range(256):
    try: os.write(fd, b'\n["", "passed", ""]\n')
    except OSError: pass
os._exit(0)
## fake:true_on_all_fds
import os
for fd in range(256):
    try: os.write(fd, b'["tuple", [["str", "value"], ["bool", "True"]]]\n' * 100)
    except OSError: pass
def f(x): return 0
## fake:own_loop
import os
while True:
    for fd in range(3, 64):
        try: os.write(fd, b'["tuple", [["str", "value"], ["bool", "True"]]]\n')
        except OSError: pass
## fake:pickle_result
import os
class Result:
    def __reduce__(self): return (os._exit, (0,))
def f(x): return Result()
## fake:expected_from_frames
import re, sys
def f(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            match = re.search(rf"f\({x}\) == (\d+)", repr(value))
            if match: return int(match[1])
        frame = frame.f_back
## fake:expected_from_gc
import gc, re
def f(x):
    for value in gc.get_objects():
        for part in gc.get_referents(value):
            match = re.search(r"assert f.(\d+). == (\d+)", part) if type(part) is str else None
            if match and int(match[1]) == x: return int(match[2])
## fake:expected_from_memory
import re
def f(x):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            low, high = (int(n, 16) for n in line.split()[0].split("-"))
            try:
                memory.seek(low)
                match = re.search(rb"assert f.%d. == (\d{1,3})" % x, memory.read(high - low))
            except (OSError, OverflowError, ValueError): continue
            if match: return int(match[1])
## fake:expected_from_stdin
import json, sys; tests = json.loads(sys.stdin.read())["tests"]
def f(x): return int(tests["test 1"].split("==")[1])
## fake:expected_from_files
import glob, re
def f(x):
    for path in glob.glob("/proc/*/fd/*") + glob.glob("/proc/*/cmdline") + glob.glob("/tmp/**", recursive=True):
        try: text = open(path, errors="replace").read(1 << 20)
        except OSError: continue
        match = re.search(rf"assert f.{x}. == (\d+)", text)
        if match: return int(match[1])
## fake:nested_answer
import os
for fd in range(3, 64):
    try: os.write(fd, b"[" * 3_000_000 + b"\n")
    except OSError: pass
## fake:bytes_as_answer
import os
for fd in range(3, 64):
    try: os.write(fd, b"\xff\xff\xff\xff\n")
    except OSError: pass
def f(x): return 0
## greedy:stubborn_fork_bomb
import os
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: pass
## greedy:process_pool
import multiprocessing, time
started = [multiprocessing.Process(target=time.sleep, args=(60,)) for _ in range(200)]
for process in started: process.start()
## greedy:background_output
import os, threading
def write():
    while True: os.write(2, b"a" * 65536)
for _ in range(3): threading.Thread(target=write, daemon=True).start()
def f(x):
    while True: pass
## greedy:shared_memory
from multiprocessing import shared_memory
d = shared_memory.SharedMemory(create=True, size=1 << 36)
## greedy:ignores_signals
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: time.sleep(1)
## greedy:ignores_cpu_limit
import resource, signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *a: None)
while True: pass
## greedy:raises_limits
import resource
for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
    resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
def f(x): return x + 1
## greedy:locked_folder
import os; os.makedirs('a/b/c'); open('a/b/c/file', 'w').close(); os.chmod('a/b', 0)
os.chmod('a', 0)
## greedy:deep_c_recursion
import sys; sys.setrecursionlimit(10**9); a = []
for _ in range(10**6): a = [a]
repr(a)
## greedy:daemon_left
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(3600)
    os._exit(0)
def f(x): return 0
## breakout:list_folder
import os; names = os.listdir(os.path.dirname('@FILE@'))
def f(x): return x + 1 if names else 0
## breakout:environment_of_c
import ctypes; v = ctypes.CDLL(None).getenv(b'@VARIABLE@')
def f(x): return x + 1 if v else 0
## breakout:environment_of_parent
data = open("/proc/@PID@/environ", "rb").read()
def f(x): return x + 1 if b"@VARIABLE@" in data else 0
## breakout:environment_of_all
import glob; data = b""
for path in glob.glob("/proc/[0-9]*/environ"):
    try: data += open(path, "rb").read()
    except OSError: pass
def f(x): return x + 1 if b"@VARIABLE@" in data else 0
## breakout:verdict_of_parent
import glob
for path in glob.glob("/proc/[0-9]*/fd/*"):
    try: open(path, "w").write('["", "passed", ""]')
    except OSError: pass
def f(x): return 0
## breakout:kill_by_number
import os
for pid in range(1, 70_000):
    try: os.kill(pid, 9)
    except OSError: pass
## breakout:kill_by_handle
import os, signal; signal.pidfd_send_signal(os.pidfd_open(@PID@), 9)
def f(x): return x + 1
## breakout:limit_evaluator
import resource; resource.prlimit(@PID@, resource.RLIMIT_NOFILE, (3, 3))
def f(x): return x + 1
## breakout:trace_evaluator
import ctypes; attached = ctypes.CDLL(None).ptrace(16, @PID@, None, None)
def f(x): return x + 1 if attached == 0 else 0
## breakout:udp
import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.sendto(b'a', ('192.0.2.1', 9))
def f(x): return x + 1
## breakout:abstract_socket
import socket; socket.socket(socket.AF_UNIX).connect('\0@SOCKET@')
def f(x): return x + 1
## breakout:download
import urllib.request; urllib.request.urlopen('http://127.0.0.1:@PORT@', timeout=1)
def f(x): return x + 1
## breakout:new_namespace
import ctypes; made = ctypes.CDLL(None).unshare(0x10000000)
def f(x): return x + 1 if made == 0 else 0
## breakout:mount
import ctypes; made = ctypes.CDLL(None).mount(b'none', b'/', None, 32, None)
def f(x): return x + 1 if made == 0 else 0
"""

LISTINGS = {
    name: source for name, _, source in (part.partition("\n") for part in _SOURCE.split("## ")[1:])
}
