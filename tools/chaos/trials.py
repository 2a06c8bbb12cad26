"""One trial: a job, a fault, and what has become of both."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import random
import re
import signal
import tempfile
import time
from typing import Dict, Iterable, List, Optional, Tuple

import pool
from faults import BEGUN, FOREVER, STEPS, Expect, Fault, Moment, Plan, Skipped, Trial
from jobs import Job, Setup

MODEL = ["--layers=1", "--dim=32", "--heads=2", "--seq=8", "--vocab=32", "--batch=1", "--warmup=0",
         "--threads=1"]
# Of waits for other ranks, and of ranks for each other to come.
TIMEOUTS = {"GPT_TIMEOUT_S": "5", "GPT_CONNECT_TIMEOUT_S": "8"}
LIMIT_S = 60  # after a fault; what has not ended by then hangs
START_S = 60  # until training has begun
INJECTED = r"injected \w+ into step \d+ at (\d+\.\d+)"
CRASH = re.compile(r"terminate called|Check failed|CHECK failed|Sanitizer|double free|corrupted|stack smashing|"
                   r"std::bad_alloc|Segmentation fault|Assertion .* failed")
ERROR = re.compile(r"^(?:\[\d+\] )?((?:[A-Z]+_)*[A-Z]{3,}: .*)$", re.MULTILINE)


@dataclasses.dataclass
class Result:
    fault: str
    backend: str
    seed: int
    detail: str = ""
    skipped: str = ""  # why there was no trial
    detection_s: Optional[float] = None  # from the fault to the job's end
    codes: List[Optional[int]] = dataclasses.field(default_factory=list)
    errors: List[str] = dataclasses.field(default_factory=list)  # distinct, without numbers
    hang: bool = False
    left: List[str] = dataclasses.field(default_factory=list)
    defects: List[str] = dataclasses.field(default_factory=list)  # what should not have been
    output: str = ""  # of a trial with defects
    took_s: float = 0

    def outcome(self) -> str:
        if self.skipped:
            return "skipped"
        if self.hang:
            return "hangs"
        return "survives" if self.codes and all(code == 0 for code in self.codes) else "fails"


def without_numbers(text: str) -> str:
    """Alike for errors that differ in ranks, steps, ports and names of scratch files only."""
    text = re.sub(r"/\S*/trial\.\w+", "DIR", text)
    text = re.sub(r"incomplete-\w+", "incomplete-N", text)
    return re.sub(r"\d+(?:\.\d+)?", "N", text)


def errors_of(text: str) -> List[str]:
    return sorted({without_numbers(error) for error in ERROR.findall(text)})


def crashes_of(text: str, plan: Plan) -> List[str]:
    """Lines of crashes, and ranks that were killed, other than those that the fault was for."""
    own = tuple(f"[{rank}] " for rank in plan.victims)
    found = [line for line in text.splitlines() if CRASH.search(line) and not line.startswith(own or ("\0",))]
    for ranks, number in re.findall(r"ranks? ([\d, ]+) w(?:as|ere) killed by signal (\d+)", text):
        others = {int(rank) for rank in ranks.split(",")} - plan.victims
        if others:
            found.append(f"signal {number} killed ranks {sorted(others)}")
    return found


def wrong_ends(text: str, plan: Plan, codes: List[Optional[int]]) -> List[str]:
    """How a job that has failed has ended otherwise than its fault makes it end, or says something else."""
    own = tuple(f"[{rank}] " for rank in plan.victims)
    errors = [match[1] for match in ERROR.finditer(text) if not match[0].startswith(own or ("\0",))]
    named = [error for error in ERROR.findall(text) if plan.says and re.search(plan.says, error)]
    found = [f"another error: {error}" for error in errors
             if error not in named and not (named and plan.follows and re.search(plan.follows, error))]
    if plan.says and not named:
        found.append(f"no rank's error has {plan.says!r}")
    # Its lines have no rank before them.
    if not re.search(f"^(?!\\[).*(?:{plan.launcher})", text, re.MULTILINE):
        found.append(f"the launcher does not say {plan.launcher!r}")
    if plan.codes and not plan.codes.intersection(code for code in codes if code is not None):
        found.append(f"it ended with {codes} instead of {sorted(plan.codes)}")
    return found


class Runner:
    """Runs trials of one program in folders of `scratch`."""

    def __init__(self, program: pathlib.Path, ranks: int, scratch: pathlib.Path, busy: int = 1):
        """`busy`: of trials at the same time so many may start or compute, while others wait for what follows."""
        self.program = program
        self.ranks = ranks
        self.scratch = scratch
        self._turns = pool.Turns(scratch, busy)
        self._expected: Dict[int, List[float]] = {}

    def _setup(self, backend: str, ranks: int) -> Setup:
        return Setup(self.program, [*MODEL, f"--backend={backend}"], ranks, dict(TIMEOUTS), turn=self._turns.take)

    def _folder(self) -> pathlib.Path:
        return pathlib.Path(tempfile.mkdtemp(prefix="trial.", dir=self.scratch))

    def expected_losses(self, ranks: int) -> List[float]:
        """Of a run without a fault; both backends give the same bits."""
        if ranks not in self._expected:
            setup = self._setup("shared_memory", ranks)
            folder = self._folder()
            setup.flags += [f"--steps={STEPS}", f"--json={folder}/report.json"]
            job = Job(setup, folder)
            if not job.await_end(10 * LIMIT_S) or job.codes() != [0]:
                job.kill()
                raise RuntimeError(f"a run without a fault fails:\n{job.text()}")
            self._expected[ranks] = json.loads((folder / "report.json").read_text())["losses"]
            job.remove()
        return self._expected[ranks]

    def run(self, fault: Fault, backend: str, seed: int) -> Result:
        begin = time.monotonic()
        result = self._run(fault, backend, seed)
        result.took_s = round(time.monotonic() - begin, 3)
        return result

    def _ranks(self, fault: Fault) -> int:
        """Those on two hosts are as many on each."""
        return self.ranks + self.ranks % 2 if fault.backends == {"gloo"} else self.ranks

    def prepare(self, faults: Iterable[Fault]) -> None:
        """Trains what these are compared with, once for all."""
        for fault in faults:
            if fault.expect in (Expect.SURVIVES, Expect.EITHER) and fault.compare is None:
                self.expected_losses(self._ranks(fault))

    def _run(self, fault: Fault, backend: str, seed: int) -> Result:
        result = Result(fault.name, backend, seed)
        draw = random.Random(seed)
        ranks = self._ranks(fault)
        folder = self._folder()
        setup = self._setup(backend, ranks)
        # Before the job: a machine under load must not slow it down.
        survives = fault.expect in (Expect.SURVIVES, Expect.EITHER) and fault.compare is None
        expected = self.expected_losses(ranks) if survives else []
        trial = Trial(setup, backend, draw, folder)
        try:
            plan = fault.prepare(trial)
        except Skipped as why:
            result.skipped = str(why)
            return result
        result.detail = plan.detail
        if fault.compare is None:
            setup.flags.append(FOREVER if fault.expect is Expect.FAILS else f"--steps={fault.steps}")
        setup.flags.append(f"--json={folder}/report.json")
        turn = contextlib.ExitStack()
        turn.enter_context(setup.turn())
        # Not between a job's start and the certainty that it is ended.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        job = Job(setup, folder)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            self._watch(job, plan, fault, result, turn)
            self._judge(job, plan, fault, result, expected)
        finally:
            job.kill()
            turn.close()
            plan.close()
            if result.defects:
                result.output = job.text()[-4000:]
            job.remove()
        return result

    def _watch(self, job: Job, plan: Plan, fault: Fault, result: Result, turn: contextlib.ExitStack) -> None:
        """From the start to the end of the job, which no longer computes where it is to fail or its steps are slow."""
        if plan.strike is not None and not self._await_moment(job, plan.at):
            result.defects.append(f"it ended before {plan.at.value}")
        if fault.compare is not None:
            turn.close()
        struck = None if result.defects else self._strike(job, plan, result)
        if fault.expect is Expect.FAILS:
            turn.close()
        result.hang = not job.await_end(LIMIT_S if fault.expect is Expect.FAILS else 3 * LIMIT_S)
        if struck is not None and not result.hang:
            result.detection_s = round(max(0.0, time.time() - struck) if plan.detected_s is None else plan.detected_s, 3)
        result.codes = job.codes()

    def _strike(self, job: Job, plan: Plan, result: Result) -> Optional[float]:
        if plan.strike is None:
            match = job.await_text(INJECTED, START_S)
            job.note_ports()
            if match is None:
                result.defects.append("the program has not come to the fault")
            return None if match is None else float(match[1])
        job.note_ports()
        try:
            return plan.strike(job)
        except (KeyError, ProcessLookupError):
            result.defects.append("it ended before the fault")
            return None

    @staticmethod
    def _await_moment(job: Job, moment: Moment) -> bool:
        if moment is Moment.TRAINING:
            return job.await_text(BEGUN, START_S) is not None
        end = time.monotonic() + START_S
        while moment is Moment.RANKS and len(job.ranks()) < job.setup.ranks:
            if not job.running() or time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def _judge(self, job: Job, plan: Plan, fault: Fault, result: Result, expected: List[float]) -> None:
        text = job.text()
        result.errors = errors_of(text)
        if result.hang:
            result.defects.append(f"it hangs: has not ended {LIMIT_S} s after the fault")
            return
        result.defects += plan.defects
        if (fault.expect is Expect.FAILS or fault.compare is not None) and (result.detection_s or 0) > fault.within_s:
            result.defects.append(f"noticed after {result.detection_s} s instead of {fault.within_s} s")
        result.left = job.left()
        result.defects += [f"left behind: {what}" for what in result.left]
        result.defects += [f"crash: {line}" for line in crashes_of(text, plan)]
        ended_well = all(code == 0 for code in result.codes)
        if fault.expect is Expect.FAILS:
            if ended_well:
                result.defects.append("it ended well")
            result.defects += wrong_ends(text, plan, result.codes)
        elif fault.expect is not Expect.EITHER and not ended_well:
            result.defects.append(f"it failed, with {result.codes}")
        if ended_well and fault.compare is not None:
            result.defects += fault.compare(job)
        elif ended_well and fault.expect is not Expect.FAILS:
            self._judge_losses(job, fault, result, expected)
        elif not ended_well and fault.expect is Expect.EITHER and not text.strip():
            result.defects.append("it failed without a word")

    @staticmethod
    def _judge_losses(job: Job, fault: Fault, result: Result, expected: List[float]) -> None:
        losses = json.loads((job.folder / "report.json").read_text())["losses"]
        if fault.expect is Expect.NAN:
            last = losses[-1]
            if last is not None and math.isfinite(last):
                result.defects.append(f"the last loss is {last}")
        elif losses != expected[:fault.steps]:
            where = next((step for step, (a, b) in enumerate(zip(losses, expected), 1) if a != b), len(losses))
            result.defects.append(f"losses are others than those of a run without a fault, from step {where} on")


Choice = Tuple[Fault, str, int]  # with which backend, and the seed of the trial


def choose(faults: List[Tuple[Fault, str]], turns: int, seed: int) -> List[Choice]:
    """Each of the faults once in every turn, in a random order, with seeds: more turns begin with fewer."""
    draw = random.Random(seed)
    chosen: List[Choice] = []
    for _ in range(turns):
        turn = list(faults)
        draw.shuffle(turn)
        chosen += [(fault, backend, draw.getrandbits(32)) for fault, backend in turn]
    return chosen


def remaining(choices: List[Choice], results: List[Result]) -> List[Choice]:
    """Those without a result yet."""
    done = {(result.fault, result.backend, result.seed) for result in results}
    return [choice for choice in choices if (choice[0].name, *choice[1:]) not in done]
