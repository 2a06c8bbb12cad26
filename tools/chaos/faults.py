"""What can go wrong with a job, how it is made to, and what has to become of the job then."""
from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
import pty
import random
import resource
import signal
import socket
import threading
import time
from typing import Callable, Dict, List, Optional, Set

from jobs import Job, Setup, signal_rank
from network import ADDRESSES, NoNetwork, TwoHosts

FOREVER = "--steps=100000000"
STEPS = 400  # of a run that is to survive
FEW_STEPS = 100  # where the fault is there from the start
# From a fault until all have noticed: who has ended is seen by its peers, or after the 10 s that the launcher waits for
# them, or when they have waited 8 s to connect;
NOTICED_S = 20
# of who is silent 7 s come first until it is named, 15 s of last words where it serves the store that ranks meet in, and
# 3 s in which it does not obey SIGTERM.
SILENT_S = 30
BEGUN = "million parameters"  # what rank 0 prints before its first step
OPERATIONS = ("any", "all_reduce", "reduce_scatter")


class Expect(enum.Enum):
    FAILS = "fails"  # with an error that says why, on all ranks
    SURVIVES = "survives"  # and has the bits of a run without the fault
    NAN = "ends with NaN"  # nobody is told, but the losses show it
    EITHER = "fails or survives"  # but does not crash or hang


class Moment(enum.Enum):
    START = "the job has been started"
    RANKS = "its ranks have been started"
    TRAINING = "training has begun"


class Skipped(Exception):
    """Why this machine cannot have the fault."""


@dataclasses.dataclass
class Plan:
    """A fault of one trial."""
    detail: str
    # Strikes, and returns when; without it the program says so in its output.
    strike: Optional[Callable[[Job], float]] = None
    at: Moment = Moment.TRAINING  # when strike() is called
    says: str = ""  # a pattern: the cause, and the rank, in each error of a job that fails; "": no rank has one
    victims: Set[int] = dataclasses.field(default_factory=set)  # ranks that may say and end anything
    follows: str = ""  # a pattern of errors that may stand beside one of `says`
    launcher: str = ""  # a pattern of what the launcher says of it
    codes: Set[int] = dataclasses.field(default_factory=set)  # one of which what was started ends with; empty: any but 0
    closers: List[Callable[[], None]] = dataclasses.field(default_factory=list)
    # Set by strike(): what has gone wrong, and after how long others went on, where the job does not end.
    defects: List[str] = dataclasses.field(default_factory=list)
    detected_s: Optional[float] = None

    def close(self) -> None:
        for closer in self.closers:
            closer()


@dataclasses.dataclass
class Trial:
    """What a fault may change before the job starts."""
    setup: Setup
    backend: str
    draw: random.Random
    folder: pathlib.Path

    def rank(self) -> int:
        return self.draw.randrange(self.setup.ranks)


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    expect: Expect
    about: str
    prepare: Callable[[Trial], Plan]
    backends: Set[str] = dataclasses.field(default_factory=lambda: {"shared_memory", "gloo"})
    steps: int = STEPS  # where it is to survive
    within_s: float = NOTICED_S  # it has to be noticed, where it is
    # What is wrong with a job that survived; without it its losses are compared with those of a run without the fault.
    compare: Optional[Callable[[Job], List[str]]] = None


FAULTS: Dict[str, Fault] = {}


def fault(name: str, expect: Expect, backends: Optional[Set[str]] = None,
          within_s: float = NOTICED_S, steps: int = STEPS,
          compare: Optional[Callable[[Job], List[str]]] = None) -> Callable[..., Callable[[Trial], Plan]]:
    """Lists a function that prepares it; its docstring is what --help says."""
    def add(prepare: Callable[[Trial], Plan]) -> Callable[[Trial], Plan]:
        FAULTS[name] = Fault(name, expect, (prepare.__doc__ or "").strip(), prepare,
                             backends or {"shared_memory", "gloo"}, steps, within_s, compare)
        return prepare
    return add


def _killed(rank: int, number: int) -> str:
    return rf"rank {rank} was killed by signal {number}\b"


def _lost(*ranks: int) -> str:
    """How peers say that they miss one of these."""
    number = rf"(?:{'|'.join(map(str, ranks))})"
    rank = rf"(?:\brank {number}\b(?! \(world rank)|\(world rank {number}\))"
    ways = [rf"{rank}(?: \([^;]*(?:; process \d+ [a-z ]+)?\))? (?:is gone|aborted:|gave up)", rf"{rank}[^;]* do(?:es)? not answer",
            rf"missing: (?:[^;]|; process)*{rank}", rf"lost the connection to {rank}", rf"nothing is known of [^;]*{rank}"]
    # It serves the store.
    store = [r"the job's store at \S+ broke off", "nobody answers at", "accepts connections but does not answer"]
    return "|".join([*ways, *store] if 0 in ranks else ways)


def _by_signal(trial: Trial, rank: int, number: int) -> Plan:
    delay = trial.draw.uniform(0, 0.5)
    moment = trial.draw.choice([Moment.RANKS, Moment.TRAINING, Moment.TRAINING, Moment.TRAINING])

    def strike(job: Job) -> float:
        time.sleep(delay)
        return signal_rank(job, rank, number)
    return Plan(f"rank {rank}, {delay:.3f} s after {moment.value}", strike, moment, _lost(rank), {rank}, launcher=_killed(rank, number))


@fault("kill", Expect.FAILS)
def _kill(trial: Trial) -> Plan:
    """a rank is killed (SIGKILL), at a random moment"""
    return _by_signal(trial, trial.rank(), signal.SIGKILL)


@fault("segv", Expect.FAILS)
def _segv(trial: Trial) -> Plan:
    """a rank has a segmentation fault"""
    return _by_signal(trial, trial.rank(), signal.SIGSEGV)


@fault("abort", Expect.FAILS)
def _abort(trial: Trial) -> Plan:
    """a rank aborts"""
    return _by_signal(trial, trial.rank(), signal.SIGABRT)


@fault("store_dead", Expect.FAILS)
def _store_dead(trial: Trial) -> Plan:
    """rank 0 is killed, which serves the store that ranks meet in"""
    return _by_signal(trial, 0, signal.SIGKILL)


@fault("stop_continue", Expect.SURVIVES)
def _stop_continue(trial: Trial) -> Plan:
    """a rank is stopped for a second (SIGSTOP, SIGCONT)"""
    rank, delay = trial.rank(), trial.draw.uniform(0, 0.2)

    def strike(job: Job) -> float:
        time.sleep(delay)
        when = signal_rank(job, rank, signal.SIGSTOP)
        time.sleep(1)
        signal_rank(job, rank, signal.SIGCONT)
        return when
    return Plan(f"rank {rank}, after {delay:.3f} s", strike)


@fault("stop", Expect.FAILS, within_s=SILENT_S)
def _stop(trial: Trial) -> Plan:
    """a rank is stopped for good: found at the deadline of a wait, 5 s here"""
    plan = _by_signal(trial, trial.rank(), signal.SIGSTOP)
    # It does not obey SIGTERM.
    plan.launcher = rf"rank {min(plan.victims)} was ended by the launcher with signal 9\b"
    return plan


@fault("kill_launcher", Expect.FAILS)
def _kill_launcher(trial: Trial) -> Plan:
    """the process that has started the ranks is killed"""
    delay = trial.draw.uniform(0, 0.5)

    def strike(job: Job) -> float:
        time.sleep(delay)
        now = time.time()
        job.processes[0].kill()
        return now
    return Plan(f"after {delay:.3f} s", strike, trial.draw.choice([Moment.RANKS, Moment.TRAINING]), codes={-signal.SIGKILL})


def _in_program(kind: str, says: Callable[[int], str], launcher: str) -> Callable[[Trial], Plan]:
    """The program strikes by itself, at an operation of a step."""
    def prepare(trial: Trial) -> Plan:
        rank, step = trial.rank(), trial.draw.randint(1, 40)
        operation = "reduce_scatter" if kind == "nan" else trial.draw.choice(OPERATIONS)
        # A step has one all-reduce.
        call = trial.draw.randrange(2) if operation == "reduce_scatter" else 0
        when = "start" if kind in ("nan", "slow") else trial.draw.choice(["start", "wait"])
        plan = f"fault={kind},rank={rank},step={step},operation={operation},call={call},when={when}"
        trial.setup.environment["GPT_FAULT_PLAN"] = plan
        return Plan(plan, says=says(rank), victims={rank}, launcher=launcher and rf"\brank {rank} {launcher}\b")
    return prepare


for _kind, _expect, _says, _launcher, _about in (
        ("kill", Expect.FAILS, _lost, "was killed by signal 9", "a rank is killed in an operation of a step"),
        ("segv", Expect.FAILS, _lost, "was killed by signal 11", "likewise, a segmentation fault"),
        ("abort", Expect.FAILS, _lost, "was killed by signal 6", "likewise, abort()"),
        ("throw", Expect.FAILS, lambda rank: "an injected exception", "exited with code 1", "likewise, an exception"),
        ("error", Expect.FAILS, lambda rank: "an injected error", "exited with code 1", "likewise, an error"),
        ("exit", Expect.FAILS, _lost, "exited with code 0", "likewise, the rank exits with 0"),
        ("stop", Expect.FAILS, _lost, "was ended by the launcher with signal 9", "likewise, the rank is stopped for good"),
        ("nan", Expect.NAN, lambda rank: "", "", "gradients of a rank are NaN"),
        ("slow", Expect.SURVIVES, lambda rank: "", "", "steps of a rank take ten times as long")):
    FAULTS[f"step_{_kind}"] = Fault(f"step_{_kind}", _expect, _about, _in_program(_kind, _says, _launcher),
                                    steps=80 if _kind == "slow" else FEW_STEPS,
                                    within_s=SILENT_S if _kind == "stop" else NOTICED_S)


@fault("port_taken", Expect.FAILS)
def _port_taken(trial: Trial) -> Plan:
    """ranks that were started one by one find another program at the port that they are told"""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    trial.setup.one_by_one = True
    trial.setup.master = ("127.0.0.1", int(listener.getsockname()[1]))
    port = trial.setup.master[1]
    return Plan(f"port {port}", lambda job: time.time(), Moment.START, rf"\bport {port} is already in use", closers=[listener.close],
                follows=rf"the job's store at \S+:{port} accepts connections but does not answer")


@fault("stdout_closed", Expect.SURVIVES, steps=FEW_STEPS)
def _stdout_closed(trial: Trial) -> Plan:
    """whoever reads the output goes away"""
    reader, writer = os.pipe()
    trial.setup.stdout = writer
    delay = trial.draw.uniform(0, 0.2)

    def strike(_: Job) -> float:
        os.close(writer)
        time.sleep(delay)
        now = time.time()
        os.close(reader)
        return now
    return Plan(f"after {delay:.3f} s", strike, Moment.RANKS)


@fault("terminal_gone", Expect.FAILS)
def _terminal_gone(trial: Trial) -> Plan:
    """the terminal is closed in which the job was started"""
    master, slave = pty.openpty()
    trial.setup.stdout, trial.setup.terminal = slave, True
    delay = trial.draw.uniform(0.3, 1)

    def strike(_: Job) -> float:
        os.close(slave)
        time.sleep(delay)
        now = time.time()
        os.close(master)
        return now
    return Plan(f"after {delay:.3f} s", strike, Moment.RANKS, launcher=r"interrupted by signal 1 \(SIGHUP\)",
                codes={128 + signal.SIGHUP})


def _small_disk(place: str, size: str) -> Callable[[int], List[str]]:
    """What a command begins with that has a small file system there, of its own."""
    script = f'mount -t tmpfs -o size={size} tmpfs "$0" && exec "$@"'
    return lambda rank: ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, place]


def _needs_mounts() -> None:
    if os.system("unshare --mount true 2>/dev/null") != 0:
        raise Skipped("no mount namespaces")


@fault("shm_full", Expect.SURVIVES, steps=FEW_STEPS)
def _shm_full(trial: Trial) -> Plan:
    """/dev/shm has 64 KiB"""
    _needs_mounts()
    trial.setup.prefix = _small_disk("/dev/shm", "64k")
    return Plan("from the start", lambda job: time.time(), Moment.START)


@fault("disk_full", Expect.FAILS)
def _disk_full(trial: Trial) -> Plan:
    """the disk that checkpoints go to is full"""
    _needs_mounts()
    disk = trial.folder / "disk"
    disk.mkdir()
    size = trial.draw.choice([64, 256, 512])
    trial.setup.prefix = _small_disk(str(disk), f"{size}k")
    trial.setup.flags += [f"--save={disk}/run", "--save_every=20"]
    return Plan(f"{size} KiB", lambda job: time.time(), says="No space left on device")


@fault("file_size", Expect.FAILS)
def _file_size(trial: Trial) -> Plan:
    """files may have so many bytes (ulimit -f), and checkpoints have more"""
    size = trial.draw.choice([4096, 16384, 40000])
    trial.setup.limits[resource.RLIMIT_FSIZE] = size
    trial.setup.flags += [f"--save={trial.folder}/run", "--save_every=20"]
    return Plan(f"{size} bytes", lambda job: time.time(), Moment.START, "too large|ulimit -f")


@fault("open_files", Expect.EITHER, steps=FEW_STEPS)
def _open_files(trial: Trial) -> Plan:
    """a process may have so many files open (ulimit -n)"""
    number = trial.draw.randint(6, 48)
    trial.setup.limits[resource.RLIMIT_NOFILE] = number
    return Plan(f"{number} files", lambda job: time.time(), Moment.START)


@fault("memory", Expect.EITHER, steps=FEW_STEPS)
def _memory(trial: Trial) -> Plan:
    """a process may have so much memory (ulimit -d)"""
    size = trial.draw.randint(96, 400)
    trial.setup.limits[resource.RLIMIT_DATA] = size << 20
    return Plan(f"{size} MiB", lambda job: time.time(), Moment.START)


def _shout(job: Job, seed: int, seconds: float) -> None:
    """Strangers at every port of the job: nothing, noise, and the beginning of what a client would say."""
    draw = random.Random(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for port in sorted(job.note_ports()):
            size = draw.choice([0, 1, 8, 100, 5000])
            noise = bytes(draw.getrandbits(8) for _ in range(size))
            # The store's first word, then something else.
            hello = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") if draw.random() < 0.5 else b""
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                    stranger.sendall(hello + noise)
                    if draw.random() < 0.3:
                        stranger.settimeout(0.05)
                        stranger.recv(100)
            except OSError:
                pass
        time.sleep(0.01)


@fault("strangers", Expect.EITHER)
def _strangers(trial: Trial) -> Plan:
    """strangers connect to the job's ports and send noise"""
    seed, moment = trial.draw.getrandbits(32), trial.draw.choice([Moment.RANKS, Moment.TRAINING])

    def strike(job: Job) -> float:
        now = time.time()
        thread = threading.Thread(target=_shout, args=(job, seed, 2.0))
        thread.start()
        thread.join()
        return now
    return Plan(f"seed {seed}, when {moment.value}", strike, moment)


def _on_two_hosts(trial: Trial) -> TwoHosts:
    """Half of the ranks on each."""
    try:
        hosts = TwoHosts()
    except NoNetwork as error:
        raise Skipped(str(error)) from error
    half = trial.setup.ranks // 2
    trial.setup.one_by_one = True
    trial.setup.master = (ADDRESSES[0], 29500)
    trial.setup.prefix = lambda rank: hosts.enter(0 if rank < half else 1)
    trial.setup.ranks_per_host = half
    return hosts


def _on_cable(trial: Trial, detail: str, act: Callable[[TwoHosts, Job], None], says: str = "") -> Plan:
    hosts = _on_two_hosts(trial)
    delay = trial.draw.uniform(0, 0.3)

    def strike(job: Job) -> float:
        time.sleep(delay)
        now = time.time()
        act(hosts, job)
        return now
    return Plan(f"{detail}, after {delay:.3f} s", strike, says=says, closers=[hosts.close])


@fault("partition", Expect.FAILS, {"gloo"}, within_s=SILENT_S)
def _partition(trial: Trial) -> Plan:
    """two hosts are cut off from each other: found at the deadline of a wait"""
    return _on_cable(trial, "the cable is cut", lambda hosts, job: hosts.set_cable(0, False),
                     _lost(*range(trial.setup.ranks)))


@fault("half_open", Expect.FAILS, {"gloo"}, within_s=SILENT_S)
def _half_open(trial: Trial) -> Plan:
    """a host dies without a word: its peers' connections stay open"""
    victims = set(range(trial.setup.ranks // 2, trial.setup.ranks))

    def act(hosts: TwoHosts, job: Job) -> None:
        hosts.set_cable(0, False)
        for rank in victims:
            signal_rank(job, rank, signal.SIGKILL)
    plan = _on_cable(trial, "the other host is gone", act, _lost(*victims))
    plan.victims = victims
    return plan


@fault("cable_flaps", Expect.SURVIVES, {"gloo"})
def _cable_flaps(trial: Trial) -> Plan:
    """packets between two hosts are lost for a second"""
    def act(hosts: TwoHosts, _: Job) -> None:
        hosts.set_cable(0, False)
        time.sleep(1)
        hosts.set_cable(0, True)
    return _on_cable(trial, "the cable is out for a second", act)


def _with_quality(name: str, about: str, change: Callable[[TwoHosts], Optional[str]]) -> None:
    def prepare(trial: Trial) -> Plan:
        hosts = _on_two_hosts(trial)
        refused = change(hosts)
        if refused is not None:
            hosts.close()
            raise Skipped(refused)
        return Plan("from the start", lambda job: time.time(), closers=[hosts.close])
    FAULTS[name] = Fault(name, Expect.SURVIVES, about, prepare, {"gloo"}, FEW_STEPS)


_with_quality("loss", "a hundredth of the packets between two hosts is lost", lambda hosts: hosts.set_netem(0.01, 0))
_with_quality("delay", "packets between two hosts take 1 ms more", lambda hosts: hosts.set_netem(0, 0.001))
_with_quality("narrow", "two hosts are 100 Mbit/s apart",
              lambda hosts: hosts.set_quality(["tbf", "rate", "100mbit", "burst", "32kbit", "latency", "400ms"]))
