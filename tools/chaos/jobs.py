"""Jobs of the GPT example as processes: started, watched, and looked for when they are gone."""
from __future__ import annotations

import dataclasses
import fcntl
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
from typing import IO, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

MARK = "CHAOS_MARK"  # in the environment of every process of a job
LAUNCHER = ("RANK", "WORLD", "MASTER", "LOCAL_", "FSDP", "TORCHELASTIC", "OMPI", "SLURM", "GPT_")


def environment_of(pid: int) -> Dict[str, str]:
    """Empty for a process that is gone, or another user's."""
    try:
        entries = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def children_of(pid: int) -> List[int]:
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


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


def listening_ports(pids: Sequence[int]) -> Set[int]:
    """Of TCP sockets that these processes listen on, in their own network namespaces."""
    ports: Set[int] = set()
    for pid in pids:
        inodes = set()
        try:
            for entry in os.listdir(f"/proc/{pid}/fd"):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{entry}"))
                if match:
                    inodes.add(match[1])
        except OSError:
            pass
        ports |= {port for port, inode in _listeners(pid) if inode in inodes}
    return ports


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


def shared_memory() -> Set[str]:
    """What has a name in /dev/shm, and segments of System V."""
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set()
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
    ranks: int = 2
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
    terminal: bool = False  # its standard streams, and its controlling terminal, are `stdout`


class Job:
    """One that runs. Its files are in `folder`, which is also its TMPDIR's parent."""

    def __init__(self, setup: Setup, folder: pathlib.Path):
        self.setup = setup
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.port = setup.master[1] or (free_port() if setup.one_by_one else 0)
        self.ports: Set[int] = set()
        self._shared_before = shared_memory()
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
        """In the child: signals as a terminal's shell leaves them, and limits."""
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN if number in self.setup.ignored_signals else signal.SIG_DFL)
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
        with open(self.folder / f"out.{rank}", "wb") as out, open(self.folder / f"err.{rank}", "wb") as err:
            stdout: Union[IO[bytes], int] = out if setup.stdout is None else setup.stdout
            return subprocess.Popen(command, stdin=setup.stdout if setup.terminal else subprocess.DEVNULL,
                                    stdout=stdout, stderr=err, env=self._environment(rank),
                                    preexec_fn=self._prepare, start_new_session=True)

    def ranks(self) -> Dict[int, int]:
        """Process ids by rank, of those that run."""
        found = {}
        for pid in marked(self.mark):
            environment = environment_of(pid)
            if "RANK" in environment:
                found[int(environment["RANK"])] = pid
        return found

    def note_ports(self) -> Set[int]:
        """Remembers on which it listens now; see left()."""
        self.ports |= listening_ports(marked(self.mark))
        return self.ports

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
        open_ports = {port for port, _ in _listeners(os.getpid())}
        found += [f"port {port}" for port in sorted(self.ports & open_ports)]
        found += sorted(shared_memory() - self._shared_before)
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
