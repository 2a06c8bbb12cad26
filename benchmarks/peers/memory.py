"""The memory of ranks while they run, from /proc.

Pages that processes share (libraries, a segment of shared memory) count in PSS by their share: the sum over all ranks
counts each page once. A rank's figure is the largest such sum over time, divided by the ranks. The largest PSS of a
single rank would be misleading: while one starts later or ends earlier, the others' shares grow.
"""
import threading
import typing

import processes

INTERVAL_SECONDS = 0.02


class Sample(typing.NamedTuple):
    """Of one process, in bytes."""
    pss: float
    peak_rss: int


def parse_kilobytes(text):
    """{"Pss": bytes, ...} from the lines "Pss:   12 kB" of smaps_rollup or status."""
    values = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        words = value.split()
        if colon and len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values


def proportional(rollup, ranks):
    """PSS, and what the kernel keeps out of it: swapped pages and hugetlbfs, taken to be shared by all or by none."""
    return (rollup["Pss"] + rollup.get("SwapPss", 0) + rollup.get("Private_Hugetlb", 0) +
            rollup.get("Shared_Hugetlb", 0) / ranks)


def rank_pids(roots, proc="/proc"):
    """Of the processes `roots` and their descendants those that are ranks: that have RANK; `roots` where none has."""
    family = processes.with_descendants(roots, proc)
    ranks = [pid for pid in family if _has_rank(pid, proc)]
    # What a rank starts inherits its variables.
    return [pid for pid in ranks if family[pid].parent not in ranks] or [pid for pid in roots if pid in family]


def _has_rank(pid, proc):
    try:
        with open(f"{proc}/{pid}/environ", "rb") as file:
            return any(entry.startswith(b"RANK=") for entry in file.read().split(b"\0"))
    except OSError:
        return False


def take_sample(pid, ranks, proc="/proc"):
    """None where the process has ended."""
    try:
        with open(f"{proc}/{pid}/smaps_rollup", encoding="utf-8") as file:
            rollup = parse_kilobytes(file.read())
        with open(f"{proc}/{pid}/status", encoding="utf-8") as file:
            status = parse_kilobytes(file.read())
    except OSError:
        return None
    if "Pss" not in rollup or "VmHWM" not in status:
        return None  # about to end
    return Sample(proportional(rollup, ranks), status["VmHWM"])


class Peak:
    """The largest of what is added."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.samples = 0
        self.pss = 0.0  # per rank
        self.rss = 0  # of the rank with most

    def add(self, samples):
        """`samples`: those of the ranks that there are, all taken at about the same time."""
        if samples:
            self.samples += 1
            self.pss = max(self.pss, sum(sample.pss for sample in samples) / self.ranks)
            self.rss = max(self.rss, *(sample.peak_rss for sample in samples))


class Sampler:
    """Watches the ranks below `roots` from a thread while it is entered."""

    def __init__(self, roots, ranks, interval=INTERVAL_SECONDS):
        self.peak = Peak(ranks)
        self._roots = list(roots)
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        while True:
            samples = [take_sample(pid, self.peak.ranks) for pid in rank_pids(self._roots)]
            self.peak.add([sample for sample in samples if sample])
            if self._stop.wait(self._interval):
                return
