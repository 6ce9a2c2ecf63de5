"""Programs that reach outside the sandbox by one system call each.

Every one of them must be refused.

Names between @ are filled in by the test: FILE (a file of the evaluator), READ (one that may be
read), SOCKET (the path of a socket for datagrams). The parent of the program's process is the
judge.
"""

PRELUDE = """
import ctypes, fcntl, os, signal, socket, struct, time
COLUMN = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
def call(numbers, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = ctypes.CDLL(None, use_errno=True).syscall(numbers[COLUMN], *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result
judge, stop = os.getppid(), signal.SIGSTOP
told = struct.pack("iiiiii", stop, 0, -1, 0, os.getpid(), os.getuid()) + bytes(104)
def f(x): return x + 1
"""

_CALLS = r"""
## kill
call((62, 129), judge, stop)
## tkill
call((200, 130), judge, stop)
## tgkill
call((234, 131), judge, judge, stop)
## rt_sigqueueinfo
call((129, 138), judge, stop, told)
## rt_tgsigqueueinfo
call((297, 240), judge, judge, stop, told)
## pidfd_send_signal
call((424, 424), call((434, 434), judge, 0), stop, None, 0)
## fcntl_owner
r, w = os.pipe()
fcntl.fcntl(r, 10, signal.SIGKILL)
fcntl.fcntl(r, fcntl.F_SETOWN, judge)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"a")
time.sleep(0.2)
## fcntl_owner_alone
fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, judge)
## fcntl_owner_ex
fcntl.fcntl(os.pipe()[0], 15, struct.pack("ii", 1, judge))
## fcntl_notify
fcntl.fcntl(os.open("/usr/lib", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE)
## ioctl_owner
fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack("i", judge))
## ioctl_terminal_input
fcntl.ioctl(0, 0x5412, b"a")
## prctl_outlive_the_judge
call((157, 167), 1, 0, 0, 0, 0)
## leave_the_group
os.setpgid(0, 0)
## scheduler
os.sched_setscheduler(judge, os.SCHED_BATCH, os.sched_param(0))
## scheduler_attributes
call((314, 274), judge, struct.pack("IIQiIQQQ", 48, 3, 0, 0, 0, 0, 0, 0), 0)
## affinity
os.sched_setaffinity(judge, os.sched_getaffinity(0))
## priority
os.setpriority(os.PRIO_PROCESS, judge, 19)
## ioprio
call((251, 30), 1, judge, 2 << 13 | 7)
## chown
os.chown("@FILE@", -1, -1)
## lchown
os.lchown("@FILE@", -1, -1)
## fchown
os.fchown(os.open(os.__file__, os.O_RDONLY), -1, -1)
## chmod
os.chmod("@FILE@", 0o777)
## fchmodat2
call((452, 452), -100, b"@FILE@", 0o777, 0)
## utime
os.utime("@FILE@", (1, 1))
## utime_of_descriptor
os.utime(os.open("@READ@", os.O_RDONLY), (1, 1))
## setxattr
os.setxattr("@FILE@", "user.rlkv", b"1")
## setxattr_of_descriptor
os.setxattr(os.open("@READ@", os.O_RDONLY), "user.rlkv", b"1")
## truncate
os.truncate("@FILE@", 0)
## truncate_on_opening
os.open("@READ@", os.O_RDONLY | os.O_TRUNC)
## truncate_without_access
os.open("@FILE@", 3 | os.O_TRUNC)
## lock
fcntl.flock(os.open("@READ@", os.O_RDONLY), fcntl.LOCK_EX)
## watch
call((294, 26), 0)
## shmget
call((29, 194), 0, 4096, 0o1600)
## semget
call((64, 190), 0, 1, 0o1600)
## msgget
call((68, 186), 0, 0o1600)
## mq_open
call((240, 180), b"rlkv_test", 0o101, 0o600, None)
## add_key
call((248, 217), b"user", b"rlkv_test", b"a", 1, -4)
## keyctl
call((250, 219), 0, -4, 1)
## request_key
call((249, 218), b"user", b"rlkv_test", None, 0)
## datagram
socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"a", "@SOCKET@")
## memory_file
os.memfd_create("a")
## new_filter
call((317, 277), 1, 0, None)
## ring
call((425, 425), 1, bytes(120))
"""

CALLS = {
    name: source for name, _, source in (part.partition("\n") for part in _CALLS.split("## ")[1:])
}
