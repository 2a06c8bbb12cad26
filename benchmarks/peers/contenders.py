"""Who takes part, how each is started, and what it reports."""
import dataclasses
import json
import pathlib
import socket
import typing

import processes
import summary

LAYERS, DIM, HEADS = 8, 512, 8
RANKS = 2
MODEL = [f"--layers={LAYERS}", f"--dim={DIM}", f"--heads={HEADS}", "--threads=1"]
FOLDER = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Shape:
    """The rows of one rank and step."""
    batch: int
    seq: int
    steps: int  # timed
    warmup: int

    @property
    def key(self):
        return f"{self.batch}x{self.seq}"

    @property
    def title(self):
        return f"batch {self.batch} x seq {self.seq}"


@dataclasses.dataclass(frozen=True)
class Contender:
    key: str
    title: str
    flags: typing.Tuple[str, ...]
    python: bool = False
    ranks: int = RANKS
    # How many independent processes are started at the same time, one rank each; 0: ranks that work together.
    independent: int = 0
    # Of the first losses of rank 0 those that are equal to those of all others: where the gradients of other rows come
    # in, only the first one is.
    equal_losses: int = summary.COMPARED_LOSSES


CONTENDERS = (
    Contender("ours", "libtorch_fsdp", ("--backend=auto",)),
    Contender("ours_gloo", "libtorch_fsdp over Gloo", ("--backend=gloo",)),
    Contender("floor", "floor: not sharded, no communication", ("--sharding=none",), independent=RANKS, equal_losses=1),
    Contender("ddp", "PyTorch DDP", ("--impl=ddp",), python=True),
    Contender("fsdp1", "PyTorch FSDP1", ("--impl=fsdp1",), python=True),
    Contender("fsdp2", "PyTorch FSDP2", ("--impl=fsdp2",), python=True),
    Contender("ours_twice", f"libtorch_fsdp, {2 * RANKS} ranks on the same cores", ("--backend=auto",), ranks=2 * RANKS,
              equal_losses=1),
)


def with_ranks(contender, ranks):
    """The same with `ranks` instead of RANKS of them."""
    own = contender.ranks * ranks // RANKS
    return dataclasses.replace(contender, ranks=own, independent=contender.independent * ranks // RANKS,
                               title=contender.title.replace(f" {contender.ranks} ranks", f" {own} ranks"))


@dataclasses.dataclass(frozen=True)
class Programs:
    train: pathlib.Path  # //testing/gpt:train
    python: typing.Optional[str]  # one with torch


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one run of a contender."""
    step_ms: float  # the median step; of independent processes the mean of their medians
    losses: typing.List[float]  # of rank 0, every step
    params: int


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _shape_flags(shape, init):
    flags = [f"--batch={shape.batch}", f"--seq={shape.seq}", f"--steps={shape.steps}", f"--warmup={shape.warmup}"]
    return flags + ([f"--init={init}"] if init else [])


def _name(contender, shape):
    return f"{contender.title} ({shape.title})"


def rank_commands(name, argv, ranks):
    """One command per rank, without a launcher, whose process would share pages with them."""
    port = str(free_port())
    return [processes.Command(f"{name}, rank {rank}", argv, {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }) for rank in range(ranks)]


def report_path(folder, index):
    return pathlib.Path(folder) / f"report.{index}.json"


def commands(contender, shape, programs, folder, init=None):
    """What to start at the same time. Reports go to `folder`; `init`: a folder with initial parameters."""
    if contender.python:
        return rank_commands(_name(contender, shape), [
            programs.python, str(FOLDER / "peer_gpt.py"), *contender.flags, "--losses", *MODEL,
            *_shape_flags(shape, init)], contender.ranks)
    argv = [str(programs.train), *contender.flags, *MODEL, *_shape_flags(shape, init)]
    if not contender.independent:
        return rank_commands(_name(contender, shape), [*argv, f"--json={report_path(folder, 0)}"], contender.ranks)
    return [processes.Command(_name(contender, shape), [*argv, "--ranks=1", f"--json={report_path(folder, index)}"],
                              {"OMP_NUM_THREADS": "1"}) for index in range(contender.independent)]


def save_init_command(shape, programs, path):
    """Writes the initial parameters that all contenders begin with."""
    return processes.Command("writing initial parameters", [
        str(programs.train), "--ranks=1", "--sharding=none", *MODEL, "--batch=1", f"--seq={shape.seq}",
        "--steps=1", "--warmup=0", f"--save-init={path}"], {"OMP_NUM_THREADS": "1"})


def parse_report(text, source):
    """The last line of `text` that is a JSON object, as a Result."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    try:
        report = json.loads(lines[-1])
        return Result(float(report["step_ms"]), [float(loss) for loss in report["loss_rank0"]], int(report["params"]))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise processes.RunError(
            f"{source}: expected a line of JSON with step_ms, loss_rank0 and params, found {text[-200:]!r} "
            f"({type(error).__name__}: {error}). Do the programs come from the same checkout?") from error


def read_result(contender, group, folder):
    """What a group that ran commands() reports."""
    if contender.python:
        return parse_report(group.stdout(0), f"{contender.title}, rank 0")
    results = []
    for index in range(contender.independent or 1):
        path = report_path(folder, index)
        if not path.exists():
            raise processes.RunError(f"{contender.title} ended well but did not write {path.name}")
        results.append(parse_report(path.read_text(encoding="utf-8"), contender.title))
    mean = sum(result.step_ms for result in results) / len(results)
    return dataclasses.replace(results[0], step_ms=mean)
