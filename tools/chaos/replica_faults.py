"""What can go wrong with replicas that outlive each other, and what has to become of the others."""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import time
from typing import Callable, Dict, List

from faults import OPERATIONS, Expect, Plan, Trial, fault
from jobs import Job, Member, children_of

STEPS = 400  # in the slow ones, 200 ms each, who was lost comes back
LOSS_TIMEOUT_S = 4
AWAY_S = 70  # until it is back: who was stopped is ended after SILENT_S
REPLAY_S = 120
SHARED_FLAGS = ["--max_restarts=20", f"--steps={STEPS}"]


def _begin(trial: Trial, replicas: int, ranks: int) -> None:
    """A job of replicas whose steps are slow until _speed_up()."""
    setup = trial.setup
    setup.replicas, setup.ranks = replicas, ranks
    setup.environment.update({"GPT_LOSS_TIMEOUT_S": str(LOSS_TIMEOUT_S), "GPT_SLOW_WHILE": str(trial.folder / "slow")})
    setup.flags += [*SHARED_FLAGS, f"--replica_history={trial.folder}/history", f"--export={trial.folder}/model"]
    (trial.folder / "slow").touch()


def _speed_up(job: Job) -> None:
    (job.folder / "slow").unlink()


def _await_members(job: Job, lives: Dict[int, int], plan: Plan) -> bool:
    """Until these have finished a step, each replica in that life of it."""
    names = " ".join(f"{replica}.{life}" for replica, life in sorted(lives.items()))
    if job.await_text(rf"from step \d+ on replicas {names}$", AWAY_S) is not None:
        return True
    plan.defects.append(f"no step was finished by replicas {names}")
    return False


def _find(job: Job, fits: Callable[[Member], bool]) -> Member:
    """Within a start; KeyError: it does not come."""
    end = time.monotonic() + AWAY_S
    while time.monotonic() < end and job.running():
        for member in job.members():
            if fits(member):
                return member
        time.sleep(0.005)
    raise KeyError("a rank of a replica")


def _lose(job: Job, plan: Plan, lives: Dict[int, int], replica: int, strike: Callable[[], None]) -> float:
    """Strikes, and waits until the others go on; they and the next life of the replica are in `lives` then."""
    now = time.time()
    strike()
    lives[replica] += 1
    others = {other: life for other, life in lives.items() if other != replica}
    if _await_members(job, others, plan):
        plan.detected_s = time.time() - now
    return now


def _signal_one(number: int, name: str) -> Callable[[Trial], Plan]:
    def prepare(trial: Trial) -> Plan:
        _begin(trial, 2, trial.setup.ranks)
        replica, rank, delay = trial.draw.randrange(2), trial.rank(), trial.draw.uniform(0, 0.5)
        plan = Plan(f"rank {rank} of replica {replica}, {delay:.3f} s after all have begun", victims={rank})

        def strike(job: Job) -> float:
            lives = {0: 1, 1: 1}
            _await_members(job, lives, plan)
            time.sleep(delay)
            victim = _find(job, lambda member: (member.replica, member.rank) == (replica, rank))
            when = _lose(job, plan, lives, replica, lambda: os.kill(victim.pid, number))
            _await_members(job, lives, plan)
            _speed_up(job)
            return when
        plan.strike = strike
        return plan
    prepare.__doc__ = name
    return prepare


def _replica_kill_in_step(trial: Trial) -> Plan:
    """likewise, in an operation of a step"""
    _begin(trial, 2, trial.setup.ranks)
    replica, rank, step = trial.draw.randrange(2), trial.rank(), trial.draw.randint(1, 40)
    detail = (f"fault=kill,replica={replica},rank={rank},step={step},"
              f"operation={trial.draw.choice(OPERATIONS)},"
              f"when={trial.draw.choice(['start', 'wait'])}")
    trial.setup.environment["GPT_FAULT_PLAN"] = detail
    plan = Plan(detail, victims={rank})

    def strike(job: Job) -> float:
        match = job.await_text(r"injected kill into step \d+ at (\d+\.\d+)", AWAY_S)
        if match is None:
            raise KeyError("the fault")
        lives = {0: 1, 1: 1}
        when = _lose(job, plan, lives, replica, lambda: None)
        _await_members(job, lives, plan)
        _speed_up(job)
        return min(when, float(match[1]))
    plan.strike = strike
    return plan


def _replica_join(trial: Trial) -> Plan:
    """a replica is killed while another one that was lost comes back"""
    _begin(trial, 3, 1)
    first, second = trial.draw.sample(range(3), 2)
    delay = trial.draw.uniform(0, 1)
    plan = Plan(f"replica {first}, then replica {second} {delay:.3f} s after the first was started again", victims={0})

    def strike(job: Job) -> float:
        lives = {0: 1, 1: 1, 2: 1}
        _await_members(job, lives, plan)
        os.kill(_find(job, lambda member: member.replica == first).pid, signal.SIGKILL)
        lives[first] += 1
        _find(job, lambda member: (member.replica, member.restart) == (first, 1))
        time.sleep(delay)
        now = time.time()
        os.kill(_find(job, lambda member: member.replica == second).pid, signal.SIGKILL)
        lives[second] += 1
        if _await_members(job, lives, plan):
            plan.detected_s = time.time() - now
        _speed_up(job)
        return now
    plan.strike = strike
    return plan


def _replica_launcher(trial: Trial) -> Plan:
    """the launcher of a replica is killed: the others go on without it"""
    _begin(trial, 2, trial.setup.ranks)
    replica, delay = trial.draw.randrange(2), trial.draw.uniform(0, 0.5)
    plan = Plan(f"replica {replica}, {delay:.3f} s after all have begun", victims=set(range(trial.setup.ranks)))

    def strike(job: Job) -> float:
        lives = {0: 1, 1: 1}
        _await_members(job, lives, plan)
        time.sleep(delay)
        rank = _find(job, lambda member: member.replica == replica)
        launcher = next(pid for pid in children_of(job.processes[0].pid) if rank.pid in children_of(pid))
        when = _lose(job, plan, lives, replica, lambda: os.kill(launcher, signal.SIGKILL))
        _speed_up(job)
        return when
    plan.strike = strike
    return plan


def _replica_keeper(trial: Trial) -> Plan:
    """the keeper of replicas is killed, in which they meet: the job ends"""
    trial.setup.replicas = 2
    delay = trial.draw.uniform(0, 0.5)

    def strike(job: Job) -> float:
        job.await_text(r"from step \d+ on replicas 0\.1 1\.1$", AWAY_S)
        time.sleep(delay)
        keeper = next(pid for pid in children_of(job.processes[0].pid) if not children_of(pid))
        now = time.time()
        os.kill(keeper, signal.SIGKILL)
        return now
    return Plan(f"{delay:.3f} s after all have begun", strike, launcher="the keeper of the replicas was killed by signal 9")


def _files(folder: pathlib.Path) -> Dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def _losses(folder: pathlib.Path) -> Dict[str, List[float]]:
    """Of each replica that has come to the end."""
    return {path.name: json.loads(path.read_text())["losses"] for path in sorted(folder.glob("report.json.*"))}


def _difference(losses: List[float], others: List[float]) -> str:
    if len(losses) != len(others):
        return f"{len(losses)} instead of {len(others)}"
    where = next(number for number, (one, other) in enumerate(zip(losses, others)) if one != other)
    return f"from number {where + 1} of {len(losses)} on, {losses[where]} instead of {others[where]}"


def _history(folder: pathlib.Path) -> str:
    """Who took part in what."""
    return "; ".join(f"{path.name}: {' | '.join(path.read_text().splitlines())}"
                     for path in sorted((folder / "history").glob("*.txt")))


def _replay(job: Job, folder: pathlib.Path) -> List[str]:
    setup = job.setup
    flags = [flag for flag in setup.flags if not flag.startswith(("--replica_history", "--export", "--json"))]
    # Nor its deadlines: nobody has to be noticed, and whoever waits longer on a busy machine would end the replay.
    environment = {name: value for name, value in setup.environment.items()
                   if name != "GPT_FAULT_PLAN" and not name.startswith("GPT_SLOW") and not name.endswith("TIMEOUT_S")}
    folder.mkdir()
    again_setup = dataclasses.replace(
        setup, environment=environment,
        flags=[*flags, f"--replica_replay={job.folder}/history", f"--export={folder}/model", f"--json={folder}/report.json"])
    with setup.turn():
        again = Job(again_setup, folder)
        try:
            if not again.await_end(REPLAY_S):
                return ["its replay hangs"]
            if again.codes() != [0]:
                return [f"its replay failed, with {again.codes()}: {again.text()[-1500:]}"]
            return [f"its replay has left behind: {what}" for what in again.left()]
        finally:
            again.kill()


def compare_with_replay(job: Job) -> List[str]:
    """A replay has the same losses and ends with the same bits; who was never lost has done every step once."""
    defects = _replay(job, job.folder / "replay")
    if defects:
        return defects
    losses, again = _losses(job.folder), _losses(job.folder / "replay")
    for name, found in losses.items():
        if name not in again:
            defects.append(f"{name}: not in the replay")
        elif again[name] != found:
            defects.append(f"{name}: other losses than in the replay, {_difference(found, again[name])}; {_history(job.folder)}")
    if STEPS not in map(len, losses.values()):
        defects.append(f"no replica has done {STEPS} steps, but {[len(found) for found in losses.values()]}")
    model, replayed = _files(job.folder / "model"), _files(job.folder / "replay" / "model")
    if not model:
        defects.append("there is no model")
    elif not replayed:
        defects.append("the replay has no model")
    elif model != replayed:
        names = sorted(name for name in {*model, *replayed} if model.get(name) != replayed.get(name))
        defects.append(f"the model is another one than that of the replay: {', '.join(names)}")
    if defects:
        printed = "".join((job.folder / "replay" / name).read_text(errors="replace") for name in ("out.0", "err.0"))
        defects.append(f"the replay has printed: {printed[-1500:]}")
    return defects


def _add(name: str, expect: Expect, prepare: Callable[[Trial], Plan]) -> None:
    fault(name, expect, compare=compare_with_replay if expect is Expect.SURVIVES else None)(prepare)


_add("replica_kill", Expect.SURVIVES, _signal_one(
    signal.SIGKILL, "a rank of a replica is killed: the others go on, and it comes back"))
_add("replica_step", Expect.SURVIVES, _replica_kill_in_step)
_add("replica_stop", Expect.SURVIVES, _signal_one(
    signal.SIGSTOP, f"likewise, it is stopped for good: found after {LOSS_TIMEOUT_S} s of silence"))
_add("replica_join", Expect.SURVIVES, _replica_join)
_add("replica_gone", Expect.SURVIVES, _replica_launcher)
_add("keeper", Expect.FAILS, _replica_keeper)
