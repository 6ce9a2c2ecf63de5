"""Hostile programs for the sandbox:

``f`` should return x + 1, and none of these may count as right.

early: leave before the tests are evaluated; fake: fake a pass; greedy: use up the machine;
breakout: reach for what belongs to others, and return the right answer only after that worked.
Names in capitals between @ are filled in by the
test: PID (the evaluator), FILE (a file of it), PORT (where it listens), SOCKET (abstract), VARIABLE
(environment).
"""

from tests.helpers.hostile_listings import LISTINGS

TESTS = ["assert f(3) == 4", "assert f(10) == 11"]

_SHORT = {
    "early:exit": "exit(0)",
    "early:quit": "quit()",
    "early:sys_exit": "import sys; sys.exit(0)",
    "early:os_exit": "import os; os._exit(0)",
    "early:system_exit_in_call": "def f(x): raise SystemExit(0)",
    "early:os_exit_in_call": "import os\ndef f(x): os._exit(0)",
    "early:keyboard_interrupt": "raise KeyboardInterrupt",
    "early:generator_exit": "def f(x): raise GeneratorExit",
    "early:stop_iteration": "def f(x): raise StopIteration",
    "early:kill_itself": "import os; os.kill(os.getpid(), 9)",
    "early:abort": "import os; os.abort()",
    "early:segfault": "import ctypes; ctypes.string_at(0)",
    "early:exec_other": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "early:exec_shell": "import os; os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "early:parent_leaves_child_stays": "import os\nif os.fork(): os._exit(0)\ndef f(x): return x + "
    "1",
    "early:close_everything": "import os; os.closerange(0, 1000)\ndef f(x): return x + 1",
    "early:main_guard_only": "if __name__ == '__main__':\n    def f(x): return x + 1",
    "early:syntax_error": "def f(x:",
    "early:null_byte": "def f(x):\n    return x + 1\x00",
    "early:empty": "",
    "fake:nan": "def f(x): return float('nan')",
    "fake:infinite_generator": "import itertools\ndef f(x): return itertools.count()",
    "fake:coroutine": "async def f(x): return x + 1",
    "fake:cyclic_list": "def f(x): a = []; a.append(a); return a",
    "fake:not_callable": "f = 4",
    "fake:reads_input": "n = int(input())\ndef f(x): return x + 1",
    "fake:huge_answer": "def f(x): return 'a' * 50_000_000",
    "fake:colliding_hashes": "def f(x): return {n * (2**61 - 1): 0 for n in range(150_000)}",
    "fake:huge_integer": "def f(x): return 1 << 100_000_000",
    "greedy:fork_bomb": "import os\nwhile True: os.fork()",
    "greedy:thread_bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
    "args=(60,)).start()",
    "greedy:endless_output": "while True: print('a' * 1000)",
    "greedy:endless_errors": "import sys\nwhile True: sys.stderr.write('a' * 1000)",
    "greedy:endless_output_in_call": "def f(x):\n    while True: print(x)",
    "greedy:output_without_end_of_line": "import os\nwhile True: os.write(1, b'a' * 65536)",
    "greedy:huge_allocation": "data = bytearray(1 << 40)",
    "greedy:growing_list": "data = []\nwhile True: data.append(' ' * 1_000_000 + str(len(data)))",
    "greedy:huge_mapping": "import mmap; data = mmap.mmap(-1, 1 << 40)",
    "greedy:memory_file": "import os; fd = os.memfd_create('a')\nwhile True: os.write(fd, b'a' * "
    "65536)",
    "greedy:big_number": "x = 10 ** 10 ** 10",
    "greedy:sleeps": "import time; time.sleep(3600)",
    "greedy:sleeps_in_call": "import time\ndef f(x): time.sleep(3600)",
    "greedy:busy": "while True: pass",
    "greedy:busy_in_call": "def f(x):\n    while True: pass",
    "greedy:slow_regular_expression": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "greedy:stops_itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "greedy:big_file": "with open('big', 'wb') as file:\n    while True: file.write(b'a' * "
    "1_000_000)",
    "greedy:many_files": 'n = 0\nwhile True: open(f"file{n}", "w").write("a" * 100_000); n += 1',
    "greedy:deep_folders": 'import os\nfor n in range(3000): os.mkdir("d"); '
    'os.chdir("d")\nos.chmod(".", 0)',
    "greedy:link_out": "import os; os.symlink('/', 'root'); os.symlink('@FILE@', 'file')",
    "greedy:many_open_files": "kept = []\nwhile True: kept.append(open('/dev/null'))",
    "greedy:endless_recursion": "def f(x): return f(x)",
    "greedy:deep_recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(x): return f(x) + 1",
    "greedy:deep_source": "f = " + "(" * 100_000,
    "greedy:daemon_holds_pipes": "import os, time\nif os.fork() == 0: os.setsid(); "
    "time.sleep(3600)\nos._exit(0)",
    "breakout:remove_all": "import shutil; shutil.rmtree('/', ignore_errors=True)",
    "breakout:remove_by_shell": "import os; os.system('rm -rf / --no-preserve-root')",
    "breakout:remove_file": "import os; os.unlink('@FILE@')\ndef f(x): return x + 1",
    "breakout:write_file": "open('@FILE@', 'a').write('x')\ndef f(x): return x + 1",
    "breakout:truncate_file": "import os; os.truncate('@FILE@', 0)\ndef f(x): return x + 1",
    "breakout:change_mode": "import os; os.chmod('@FILE@', 0o777)\ndef f(x): return x + 1",
    "breakout:read_file": "data = open('@FILE@').read()\ndef f(x): return x + 1 if data else 0",
    "breakout:read_file_by_root": "data = open('/proc/@PID@/root@FILE@').read()\ndef f(x): return "
    "x + 1 if data else 0",
    "breakout:write_library": "import os; open(os.__file__, 'a').write('#')\ndef f(x): return x + "
    "1",
    "breakout:passwords": "data = open('/etc/passwd').read()\ndef f(x): return x + 1 if data else "
    "0",
    "breakout:environment": "import os; value = os.environ['@VARIABLE@']\ndef f(x): return x + 1",
    "breakout:kill_evaluator": "import os; os.kill(@PID@, 9)\ndef f(x): return x + 1",
    "breakout:kill_parent": "import os; os.kill(os.getppid(), 9)\ndef f(x): return 0",
    "breakout:kill_all": "import os; os.kill(-1, 9)\ndef f(x): return 0",
    "breakout:kill_group": "import os; os.kill(0, 9)\ndef f(x): return 0",
    "breakout:kill_by_c": "import ctypes; ctypes.CDLL(None).kill(-1, 9)\ndef f(x): return 0",
    "breakout:stop_evaluator": "import os, signal; os.kill(@PID@, signal.SIGSTOP)\ndef f(x): "
    "return x + 1",
    "breakout:slow_evaluator": "import os; os.setpriority(os.PRIO_PROCESS, @PID@, 19)\ndef f(x): "
    "return x + 1",
    "breakout:tcp": "import socket; socket.create_connection(('127.0.0.1', @PORT@), 1)\ndef f(x): "
    "return x + 1",
    "breakout:listen": "import socket; s = socket.create_server(('127.0.0.1', 0))\ndef f(x): "
    "return x + 1",
    "breakout:become_root": "import os; os.setuid(0)\ndef f(x): return x + 1",
    "breakout:change_root": "import os; os.chroot('/')\ndef f(x): return x + 1",
    "breakout:device": "import os; os.mknod('disk', 0o60666, os.makedev(254, 0))\ndef f(x): return "
    "x + 1",
    "breakout:import_evaluator": "import rlkv, torch\ndef f(x): return x + 1",
}

PROGRAMS = _SHORT | LISTINGS
