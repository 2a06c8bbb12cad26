"""A long run that loses a rank every so many steps and starts again each time: it ends with the bits of an unbroken one."""
from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import random
import re
import time
from typing import Callable, Dict, List

from jobs import Job, Setup
from trials import MODEL, TIMEOUTS

UNBROKEN = "unbroken"  # the folder of a run without faults
# What a rank meets; all end the attempt.
KINDS = ("kill", "segv", "abort", "throw", "error", "exit")


def files_of(checkpoint: pathlib.Path) -> Dict[str, str]:
    """SHA-256 by name, but of what ranks have for themselves (random states) and of the manifest with its checksums."""
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(checkpoint.rglob("*"))
            if path.is_file() and path.parent.name != "ranks" and path.name != "manifest.json"}


def fault_plan(draw: random.Random, attempts: int, ranks: int, every: int) -> str:
    """A fault in each attempt, in one of the last steps of the first `every`."""
    return ";".join(f"fault={draw.choice(KINDS)},restart={attempt},rank={draw.randrange(ranks)},"
                    f"step={draw.randint(every - every // 10, every)},when={draw.choice(['start', 'wait'])}"
                    for attempt in range(attempts))


@dataclasses.dataclass
class Soaked:
    steps: int
    faults: int = 0
    seconds: float = 0
    defects: List[str] = dataclasses.field(default_factory=list)
    output: str = ""  # where there are defects


@dataclasses.dataclass
class Soak:
    program: pathlib.Path
    backend: str
    ranks: int
    steps: int
    every: int  # a fault
    seed: int
    folder: pathlib.Path
    say: Callable[[str], None]

    def _job(self, name: str, backend: str, flags: List[str], environment: Dict[str, str]) -> Job:
        folder = self.folder / name
        folder.mkdir()
        setup = Setup(self.program, [*MODEL, f"--backend={backend}", f"--steps={self.steps}",
                                     f"--save={folder}/run", "--resume", "--keep_last=2", *flags], self.ranks,
                      {**TIMEOUTS, **environment})
        return Job(setup, folder)

    def _await(self, job: Job, name: str) -> None:
        while not job.await_end(10):
            restarts = re.findall(r"^restart (\d+) of", job.text(), re.MULTILINE)
            steps = re.findall(r"goes on after step (\d+)", job.text())
            self.say(f"{name}: {len(restarts)} restarts, goes on after step {steps[-1] if steps else 0} of {self.steps}")

    def run(self) -> Soaked:
        result = Soaked(self.steps)
        begin = time.monotonic()
        # An attempt may save less than it trains: more of them than faults that fit.
        attempts = 3 * self.steps // self.every + 10
        plan = fault_plan(random.Random(self.seed), attempts, self.ranks, self.every)
        saves = max(1, self.every // 5)
        job = self._job(f"faults.{self.backend}", self.backend,
                        [f"--save_every={saves}", f"--max_restarts={attempts}"], {"GPT_FAULT_PLAN": plan})
        try:
            self._await(job, "with faults")
            text = job.text()
            result.faults = len(re.findall(r"injected \w+ into step", text))
            result.defects += [f"left behind: {what}" for what in job.left()]
            if job.codes() != [0]:
                result.defects.append(f"it ended with {job.codes()}")
            elif result.faults < self.steps // self.every // 2:
                result.defects.append(f"only {result.faults} faults")
            else:
                result.defects += self._compare()
            result.output = text[-4000:] if result.defects else ""
        finally:
            job.kill()
        result.seconds = round(time.monotonic() - begin, 1)
        return result

    def _compare(self) -> List[str]:
        """With a run that all backends have in common."""
        if not (self.folder / UNBROKEN).exists():
            job = self._job(UNBROKEN, "shared_memory", [], {})
            try:
                self._await(job, UNBROKEN)
                if job.codes() != [0]:
                    return [f"a run without a fault ended with {job.codes()}: {job.text()[-2000:]}"]
            finally:
                job.kill()
        last = f"run/step-{self.steps}"
        broken, unbroken = (files_of(self.folder / name / last) for name in (f"faults.{self.backend}", UNBROKEN))
        if not unbroken:
            return [f"there is no {last}"]
        return [f"{name} is another one than that of an unbroken run" for name in sorted(set(broken) | set(unbroken))
                if broken.get(name) != unbroken.get(name)]
