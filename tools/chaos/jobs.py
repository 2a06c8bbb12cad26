"""Jobs of the GPT example as processes: started, watched, and looked for when they are gone."""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import termios
import time
import uuid
from typing import IO, Callable, ContextManager, Dict, List, Optional, Sequence, Set, Tuple, Union

MARK = "CHAOS_MARK"  # in the environment of every process of a job
LAUNCHER = ("RANK", "WORLD", "MASTER", "LOCAL_", "FSDP", "TORCHELASTIC", "OMPI", "SLURM", "GPT_")
SHARED_MEMORY = "/dev/shm"


def environment_of(pid: int) -> Dict[str, str]:
    """Empty for a process that is gone, or another user's."""
    try:
        entries = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def children_of(pid: int) -> List[int]:
    """Those of all its threads."""
    found: List[int] = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            pass
    return found


def family_of(pid: int) -> List[int]:
    """It and its descendants; much cheaper than marked(), but blind for those whose parents are gone."""
    found = [pid]
    for one in found:
        found += children_of(one)
    return found


def is_alive(pid: int) -> bool:
    """Whether it runs or is stopped; a zombie has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def marked(mark: str) -> List[int]:
    """The live processes of a job, whoever their parents are."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if environment_of(pid).get(MARK) == mark and is_alive(pid)]


def listening_sockets(pids: Sequence[int]) -> Set[Tuple[int, str]]:
    """Port and inode of TCP sockets that these processes listen on, in their own network namespaces."""
    sockets: Set[Tuple[int, str]] = set()
    for pid in pids:
        inodes = set()
        try:
            for entry in os.listdir(f"/proc/{pid}/fd"):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
                if match:
                    inodes.add(match[1])
        except OSError:
            pass
        if inodes:
            sockets |= {(port, inode) for port, inode in _listeners(pid) if inode in inodes}
    return sockets


def _listeners(pid: int) -> List[Tuple[int, str]]:
    """Port and inode of each listening TCP socket of the process's network namespace."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A":
                found.append((int(fields[1].rsplit(":", 1)[1], 16), fields[9]))
    return found


_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


def _take_shared_memory(folder: bytes) -> None:
    """From here on this process and those that it starts have `folder` for their /dev/shm."""
    if (_LIBC.unshare(_CLONE_NEWNS) != 0
            or _LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) != 0
            or _LIBC.mount(folder, SHARED_MEMORY.encode(), None, ctypes.c_ulong(_MS_BIND), None) != 0):
        raise OSError(ctypes.get_errno(), "a /dev/shm of its own")


@functools.lru_cache(maxsize=None)
def has_own_shared_memory() -> bool:
    """Whether jobs can have a /dev/shm each: then what is left there is known to be theirs."""
    child = os.fork()
    if child == 0:
        try:
            _take_shared_memory(b"/tmp")
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def shared_memory(folder: Union[str, pathlib.Path] = SHARED_MEMORY) -> Set[str]:
    """What has a name there, and segments of System V."""
    names = {f"{folder}/{name}" for name in os.listdir(folder)} if os.path.isdir(folder) else set()
    try:
        lines = pathlib.Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    except OSError:
        lines = []
    return names | {f"System V segment {line.split()[1]}" for line in lines}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclasses.dataclass
class Setup:
    """How a job is started."""
    program: pathlib.Path
    flags: List[str]
    ranks: int = 2  # of each replica, where there are several
    environment: Dict[str, str] = dataclasses.field(default_factory=dict)
    # Commands before the program; of rank r where ranks are started one by one.
    prefix: Callable[[int], Sequence[str]] = lambda rank: ()
    # Started one by one, as by torchrun, instead of by the program itself.
    one_by_one: bool = False
    master: Tuple[str, int] = ("127.0.0.1", 0)  # then; 0: a free port
    ranks_per_host: Optional[int] = None  # then, where there are several hosts
    limits: Dict[int, int] = dataclasses.field(default_factory=dict)  # RLIMIT_...: value
    stdout: Optional[int] = None  # a descriptor instead of a file
    ignored_signals: Tuple[int, ...] = ()
    replicas: int = 0
    # A turn at the machine: what starts or computes takes one, what only waits does not.
    turn: Callable[[], ContextManager[None]] = contextlib.nullcontext
    terminal: bool = False  # its standard streams, and its controlling terminal, are `stdout`


@dataclasses.dataclass(frozen=True)
class Member:
    """A rank that runs."""
    pid: int
    rank: int
    replica: int  # 0 where there are none
    restart: int  # how often it has been started again


class Job:
    """One that runs. Its files are in `folder`, which is also its TMPDIR's parent."""

    def __init__(self, setup: Setup, folder: pathlib.Path):
        self.setup = setup
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.port = setup.master[1] or (free_port() if setup.one_by_one else 0)
        self._sockets: Set[Tuple[int, str]] = set()  # that it listened on
        self._shared = pathlib.Path(SHARED_MEMORY)
        if has_own_shared_memory():
            self._shared = folder / "shm"
            self._shared.mkdir()
        self._shared_before = shared_memory(self._shared)
        self.processes = [self._start(rank) for rank in range(setup.ranks if setup.one_by_one else 1)]

    def _environment(self, rank: int) -> Dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
        environment.update({MARK: self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)})
        if self.setup.one_by_one:
            environment.update({"RANK": str(rank), "WORLD_SIZE": str(self.setup.ranks),
                                "MASTER_ADDR": self.setup.master[0], "MASTER_PORT": str(self.port)})
            if self.setup.ranks_per_host is not None:
                environment.update({"LOCAL_RANK": str(rank % self.setup.ranks_per_host),
                                    "LOCAL_WORLD_SIZE": str(self.setup.ranks_per_host)})
        environment.update(self.setup.environment)
        return environment

    def _prepare(self) -> None:
        """In the child: its /dev/shm, signals as a terminal's shell leaves them, and limits."""
        if has_own_shared_memory():
            _take_shared_memory(bytes(self._shared))
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN if number in self.setup.ignored_signals else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if self.setup.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for limit, value in self.setup.limits.items():
            resource.setrlimit(limit, (value, value))

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        setup = self.setup
        command = [*setup.prefix(rank), str(setup.program), *setup.flags]
        if not setup.one_by_one:
            command.append(f"--ranks={setup.ranks}")
            command += [f"--replicas={setup.replicas}"] if setup.replicas else []
        with open(self.folder / f"out.{rank}", "wb") as out, open(self.folder / f"err.{rank}", "wb") as err:
            stdout: Union[IO[bytes], int] = out if setup.stdout is None else setup.stdout
            return subprocess.Popen(command, stdin=setup.stdout if setup.terminal else subprocess.DEVNULL,
                                    stdout=stdout, stderr=err, env=self._environment(rank),
                                    preexec_fn=self._prepare, start_new_session=True)

    def family(self) -> List[int]:
        """Its processes, but for those whose parents are gone."""
        return [pid for process in self.processes for pid in family_of(process.pid)]

    def ranks(self) -> Dict[int, int]:
        """Process ids by rank, of those that run."""
        return {member.rank: member.pid for member in self.members()}

    def members(self) -> List[Member]:
        """The ranks that run, of all replicas."""
        found = []
        for pid in self.family():
            variables = environment_of(pid)
            if "RANK" in variables and is_alive(pid):
                found.append(Member(pid, int(variables["RANK"]), int(variables.get("FSDP_REPLICA", 0)),
                                    int(variables.get("TORCHELASTIC_RESTART_COUNT", 0))))
        return found

    def note_ports(self) -> Set[int]:
        """Remembers on which it listens now; see left(). All that it has listened on."""
        self._sockets |= listening_sockets(self.family())
        return {port for port, _ in self._sockets}

    def text(self) -> str:
        """What it has printed so far."""
        return "".join(path.read_text(errors="replace") for kind in ("out", "err")
                       for path in sorted(self.folder.glob(f"{kind}.*")))

    def await_text(self, pattern: str, seconds: float) -> Optional["re.Match[str]"]:
        """The first match that it prints by then, while it runs."""
        end = time.monotonic() + seconds
        while True:
            running = self.running()
            match = re.search(pattern, self.text(), re.MULTILINE)
            if match or not running or time.monotonic() > end:
                return match
            time.sleep(0.02)

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def await_end(self, seconds: float) -> bool:
        """Whether all that was started here has ended by then."""
        end = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def codes(self) -> List[Optional[int]]:
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """All of it, however it is."""
        for _ in range(3):
            for pid in marked(self.mark):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for process in self.processes:
            process.wait()

    def left(self, seconds: float = 5.0) -> List[str]:
        """What is still there `seconds` after its end: processes, ports, shared memory, temporary files."""
        end = time.monotonic() + seconds
        while self._remains() and time.monotonic() < end:
            time.sleep(0.02)
        return self._remains()

    def _remains(self) -> List[str]:
        found = [f"process {pid}: {' '.join(self._command(pid))}" for pid in marked(self.mark)]
        # Threads of a killed process may close its sockets a little later than it is gone.
        # A port may be another job's by now, a socket cannot.
        found += [f"port {port}" for port, _ in sorted(self._sockets & set(_listeners(os.getpid())))]
        found += sorted(shared_memory(self._shared) - self._shared_before)
        return found + [str(path) for path in sorted(self.temporary.rglob("*"))]

    @staticmethod
    def _command(pid: int) -> List[str]:
        try:
            return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:3]
        except OSError:
            return []

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def signal_rank(job: Job, rank: int, number: int) -> float:
    """When it was sent."""
    pid = job.ranks()[rank]
    now = time.time()
    os.kill(pid, number)
    return now
