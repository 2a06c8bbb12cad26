"""Groups of processes that run at the same time, until a deadline, and of which none is left."""
import contextlib
import dataclasses
import os
import pathlib
import selectors
import signal
import subprocess
import time
import typing

# What starts ranks sets these, and what is measured must not take itself for one of somebody else's ranks.
LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
                       "MASTER_PORT")
LAUNCHERS_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_")
LAST_LINES = 15


class RunError(Exception):
    """What went wrong and what to do, for people to read."""


@dataclasses.dataclass(frozen=True)
class Command:
    name: str
    argv: typing.List[str]
    env: typing.Dict[str, str] = dataclasses.field(default_factory=dict)


class Running(typing.NamedTuple):
    """A process as /proc shows it."""
    parent: int
    start: str  # in ticks; tells a process from a later one with its number


def all_processes(proc="/proc"):
    """{pid: Running}"""
    found = {}
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        try:
            with open(f"{proc}/{entry}/stat", encoding="utf-8", errors="replace") as file:
                # The name, in parentheses, may have anything in it.
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if len(fields) > 19 and fields[0] != "Z":
            found[int(entry)] = Running(int(fields[1]), fields[19])
    return found


def with_descendants(pids, proc="/proc"):
    """{pid: Running} of those that there are of `pids`, their children, and so on; parents first."""
    everybody = all_processes(proc)
    found = {pid: everybody[pid] for pid in pids if pid in everybody}
    level = list(found)
    while level:
        level = [pid for pid, process in everybody.items() if process.parent in level and pid not in found]
        found.update((pid, everybody[pid]) for pid in level)
    return found


def clean_environment(environment):
    return {name: value for name, value in environment.items()
            if name not in LAUNCHERS_VARIABLES and not name.startswith(LAUNCHERS_PREFIXES)}


def _how_it_ended(code):
    if code >= 0:
        return f"exited with code {code}"
    text = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return text + ", often a sign of too little memory" if code == -signal.SIGKILL else text


@contextlib.contextmanager
def uninterrupted():
    """What SIGINT and SIGTERM do, which may be an exception, they do behind the block. For the main thread."""
    arrived = []
    usual = {number: signal.signal(number, lambda number, _: arrived.append(number))
             for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


class Group:
    """Runs commands while it is entered. Their output goes to files in `folder`."""

    def __init__(self, commands, folder, grace=3.0):
        self._commands = list(commands)
        self._folder = pathlib.Path(folder)
        self._grace = grace  # seconds from SIGTERM to SIGKILL
        self._processes = []

    @property
    def pids(self):
        return [process.pid for process in self._processes]

    def stdout(self, index):
        return self._output(index, "stdout").read_text(encoding="utf-8", errors="replace")

    def __enter__(self):
        try:
            # A process must not be started without being known.
            with uninterrupted():
                for index, command in enumerate(self._commands):
                    self._processes.append(self._start(index, command))
        except OSError as error:
            self._stop()
            raise RunError(f"{command.name}: cannot start {command.argv[0]}: {error.strerror}") from error
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        self._stop()

    def wait(self, seconds):
        """Until all have ended well. Raises RunError when one fails, or when the time is over."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            fds = [os.pidfd_open(pid) for pid in self.pids]
            try:
                for index, fd in enumerate(fds):
                    selector.register(fd, selectors.EVENT_READ, index)
                while selector.get_map():
                    events = selector.select(max(0.0, deadline - time.monotonic()))
                    if not events:
                        late = min(key.data for key in selector.get_map().values())
                        raise RunError(self._describe(late, f"did not end within {seconds:g} s"))
                    for key, _ in events:
                        selector.unregister(key.fd)
                        self._check_end(key.data)
            finally:
                for fd in fds:
                    os.close(fd)

    def _output(self, index, stream):
        return self._folder / f"{stream}.{index}"

    def _start(self, index, command):
        with open(self._output(index, "stdout"), "wb") as out, open(self._output(index, "stderr"), "wb") as err:
            # A session of its own: what it leaves behind can be found.
            return subprocess.Popen(command.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                    env={**clean_environment(os.environ), **command.env}, start_new_session=True)

    def _check_end(self, index):
        # Not reaped before _stop(): the number of its process group must not become somebody else's.
        end = os.waitid(os.P_PID, self._processes[index].pid, os.WEXITED | os.WNOWAIT)
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        if code != 0:
            raise RunError(self._describe(index, _how_it_ended(code)))

    def _describe(self, index, what):
        command = self._commands[index]
        text = f"{command.name} {what}\n  command: {' '.join(map(str, command.argv))}"
        for stream in ("stderr", "stdout"):
            lines = self._output(index, stream).read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                text += f"\n  the last lines of its {stream}:\n    " + "\n    ".join(lines[-LAST_LINES:])
        return text

    def _stop(self):
        """Ends all processes, and what they have started."""
        with uninterrupted():
            self._end_all()

    def _end_all(self):
        alive = [process for process in self._processes if
                 os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None]
        family = with_descendants([process.pid for process in alive])
        for process in alive:
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        for process in alive:
            fd = os.pidfd_open(process.pid)
            with selectors.DefaultSelector() as selector:
                selector.register(fd, selectors.EVENT_READ)
                selector.select(max(0.0, deadline - time.monotonic()))
            os.close(fd)
        for process in self._processes:
            _kill(os.killpg, process.pid)
        now = all_processes()
        for pid, running in family.items():
            if pid in now and now[pid].start == running.start:
                _kill(os.kill, pid)
        for process in self._processes:
            process.wait()
        self._processes = []


def _kill(kill, pid):
    try:
        kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
