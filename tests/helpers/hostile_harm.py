"""Hostile programs that use up the machine or reach for what is not theirs; see hostile_programs.py."""

# use up the machine
GREEDY = {
    "fork_bomb": "import os\nwhile True:\n    os.fork()\n",
    "stubborn_fork_bomb": """
        import os
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
            except OSError:
                pass
        """,
    "thread_bomb": """
        import threading, time
        while True:
            threading.Thread(target=time.sleep, args=(60,)).start()
        """,
    "process_pool": """
        import multiprocessing, time
        started = [multiprocessing.Process(target=time.sleep, args=(60,)) for _ in range(200)]
        for process in started:
            process.start()
        """,
    "endless_output": "while True:\n    print('a' * 1000)",
    "endless_errors": "import sys\nwhile True:\n    sys.stderr.write('a' * 1000)",
    "endless_output_in_call": "def f(x):\n    while True:\n        print(x)",
    "output_without_end_of_line": "import os\nwhile True:\n    os.write(1, b'a' * 65536)",
    "background_output": """
        import os, threading
        def write():
            while True:
                os.write(2, b"a" * 65536)
        for _ in range(3):
            threading.Thread(target=write, daemon=True).start()
        def f(x):
            while True:
                pass
        """,
    "huge_allocation": "data = bytearray(1 << 40)",
    "growing_list": "data = []\nwhile True:\n    data.append(' ' * 1_000_000 + str(len(data)))",
    "huge_mapping": "import mmap\ndata = mmap.mmap(-1, 1 << 40)",
    "memory_file": "import os\nfd = os.memfd_create('a')\nwhile True:\n    os.write(fd, b'a' * 65536)",
    "shared_memory": """
        from multiprocessing import shared_memory
        d = shared_memory.SharedMemory(create=True, size=1 << 36)
        """,
    "big_number": "x = 10 ** 10 ** 10",
    "sleeps": "import time\ntime.sleep(3600)",
    "sleeps_in_call": "import time\ndef f(x):\n    time.sleep(3600)",
    "busy": "while True:\n    pass",
    "busy_in_call": "def f(x):\n    while True:\n        pass",
    "slow_regular_expression": "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    "ignores_signals": """
        import signal, time
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)
        """,
    "ignores_cpu_limit": """
        import resource, signal
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *a: None)
        while True:
            pass
        """,
    "raises_limits": """
        import resource
        for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        def f(x): return x + 1
        """,
    "stops_itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "big_file": "with open('big', 'wb') as file:\n    while True:\n        file.write(b'a' * 1_000_000)",
    "many_files": """
        n = 0
        while True:
            open(f"file{n}", "w").write("a" * 100_000)
            n += 1
        """,
    "deep_folders": """
        import os
        for n in range(3000):
            os.mkdir("d")
            os.chdir("d")
        os.chmod(".", 0)
        """,
    "locked_folder": """
        import os
        os.makedirs('a/b/c')
        open('a/b/c/file', 'w').close()
        os.chmod('a/b', 0)
        os.chmod('a', 0)
        """,
    "link_out": "import os\nos.symlink('/', 'root')\nos.symlink('@FILE@', 'file')",
    "many_open_files": "kept = []\nwhile True:\n    kept.append(open('/dev/null'))",
    "endless_recursion": "def f(x): return f(x)",
    "deep_recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x) + 1",
    "deep_c_recursion": """
        import sys
        sys.setrecursionlimit(10**9)
        a = []
        for _ in range(10**6):
            a = [a]
        repr(a)
        """,
    "deep_source": "f = " + "(" * 100_000,
    "daemon_left": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        def f(x): return 0
        """,
    "daemon_holds_pipes": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
        os._exit(0)
        """,
}

# reach what belongs to others
BREAKOUTS = {
    "remove_all": "import shutil\nshutil.rmtree('/', ignore_errors=True)",
    "remove_by_shell": "import os\nos.system('rm -rf / --no-preserve-root')",
    "remove_file": "import os\nos.unlink('@FILE@')\ndef f(x): return x + 1",
    "write_file": "open('@FILE@', 'a').write('x')\ndef f(x): return x + 1",
    "truncate_file": "import os\nos.truncate('@FILE@', 0)\ndef f(x): return x + 1",
    "change_mode": "import os\nos.chmod('@FILE@', 0o777)\ndef f(x): return x + 1",
    "read_file": "data = open('@FILE@').read()\ndef f(x): return x + 1 if data else 0",
    "read_file_by_root": "data = open('/proc/@PID@/root@FILE@').read()\ndef f(x): return x + 1 if data else 0",
    "list_folder": "import os\nnames = os.listdir(os.path.dirname('@FILE@'))\ndef f(x): return x + 1 if names else 0",
    "write_library": "import os\nopen(os.__file__, 'a').write('#')\ndef f(x): return x + 1",
    "passwords": "data = open('/etc/passwd').read()\ndef f(x): return x + 1 if data else 0",
    "environment": "import os\nvalue = os.environ['@VARIABLE@']\ndef f(x): return x + 1",
    "environment_of_c": """
        import ctypes
        v = ctypes.CDLL(None).getenv(b'@VARIABLE@')
        def f(x): return x + 1 if v else 0
        """,
    "environment_of_parent": """
        data = open("/proc/@PID@/environ", "rb").read()
        def f(x): return x + 1 if b"@VARIABLE@" in data else 0
        """,
    "environment_of_all": """
        import glob
        data = b""
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                data += open(path, "rb").read()
            except OSError:
                pass
        def f(x): return x + 1 if b"@VARIABLE@" in data else 0
        """,
    "verdict_of_parent": """
        import glob
        for path in glob.glob("/proc/[0-9]*/fd/*"):
            try:
                open(path, "w").write('{"reason": "passed", "detail": "", "reached": []}')
            except OSError:
                pass
        def f(x): return 0
        """,
    "kill_evaluator": "import os\nos.kill(@PID@, 9)\ndef f(x): return x + 1",
    "kill_parent": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return 0",
    "kill_all": "import os\nos.kill(-1, 9)\ndef f(x): return 0",
    "kill_group": "import os\nos.kill(0, 9)\ndef f(x): return 0",
    "kill_by_number": """
        import os
        for pid in range(1, 70_000):
            try:
                os.kill(pid, 9)
            except OSError:
                pass
        """,
    "kill_by_c": "import ctypes\nctypes.CDLL(None).kill(-1, 9)\ndef f(x): return 0",
    "kill_by_handle": "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(@PID@), 9)\ndef f(x): return x + 1",
    "stop_evaluator": "import os, signal\nos.kill(@PID@, signal.SIGSTOP)\ndef f(x): return x + 1",
    "limit_evaluator": """
        import resource
        resource.prlimit(@PID@, resource.RLIMIT_NOFILE, (3, 3))
        def f(x): return x + 1
        """,
    "slow_evaluator": "import os\nos.setpriority(os.PRIO_PROCESS, @PID@, 19)\ndef f(x): return x + 1",
    "trace_evaluator": """
        import ctypes
        attached = ctypes.CDLL(None).ptrace(16, @PID@, None, None)
        def f(x): return x + 1 if attached == 0 else 0
        """,
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 1)\ndef f(x): return x + 1",
    "udp": """
        import socket
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        s.sendto(b'a', ('192.0.2.1', 9))
        def f(x): return x + 1
        """,
    "abstract_socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0@SOCKET@')\ndef f(x): return x + 1",
    "listen": "import socket\ns = socket.create_server(('127.0.0.1', 0))\ndef f(x): return x + 1",
    "download": """
        import urllib.request
        urllib.request.urlopen('http://127.0.0.1:@PORT@', timeout=1)
        def f(x): return x + 1
        """,
    "become_root": "import os\nos.setuid(0)\ndef f(x): return x + 1",
    "new_namespace": """
        import ctypes
        made = ctypes.CDLL(None).unshare(0x10000000)
        def f(x): return x + 1 if made == 0 else 0
        """,
    "mount": """
        import ctypes
        made = ctypes.CDLL(None).mount(b'none', b'/', None, 32, None)
        def f(x): return x + 1 if made == 0 else 0
        """,
    "change_root": "import os\nos.chroot('/')\ndef f(x): return x + 1",
    "device": "import os\nos.mknod('disk', 0o60666, os.makedev(254, 0))\ndef f(x): return x + 1",
    "import_evaluator": "import rlkv, torch\ndef f(x): return x + 1",
}
