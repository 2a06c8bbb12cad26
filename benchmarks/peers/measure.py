"""Runs contenders in turns and collects what they report."""
import dataclasses
import pathlib
import statistics
import sys
import time
import typing

import contenders
import memory
import processes
import summary


class Progress:
    """Lines on stderr: what runs, what it gave, and about how long the rest will take."""

    def __init__(self, names, out=sys.stderr, clock=time.monotonic):
        self._left = list(names)  # equal names take equally long
        self._total = len(self._left)
        self._out, self._clock = out, clock
        self._seconds = {}

    def remaining_seconds(self):
        """To be asked once something has run."""
        usual = statistics.mean(map(statistics.mean, self._seconds.values()))
        return sum(statistics.mean(self._seconds[name]) if name in self._seconds else usual for name in self._left)

    def run(self, name, what, job):
        """job() gives the text to show."""
        begin = self._clock()
        result = job()
        self._left.remove(name)
        self._seconds.setdefault(name, []).append(self._clock() - begin)
        number = self._total - len(self._left)
        self._out.write(f"[{number:{len(str(self._total))}}/{self._total}] {what}: {result}{self._rest()}\n")
        self._out.flush()

    def _rest(self):
        if not self._left:
            return ""
        seconds = self.remaining_seconds()
        return f"   ({seconds / 60:.0f} min left)" if seconds >= 90 else f"   ({seconds:.0f} s left)"


@dataclasses.dataclass
class Measured:
    """Keys are (contender, shape)."""
    contenders: typing.List[contenders.Contender]
    shapes: typing.List[contenders.Shape]
    steps: typing.Dict[typing.Tuple[str, str], typing.List[float]] = dataclasses.field(default_factory=dict)  # ms
    peaks: typing.Dict[typing.Tuple[str, str], memory.Peak] = dataclasses.field(default_factory=dict)
    losses: typing.Dict[typing.Tuple[str, str], typing.List[float]] = dataclasses.field(default_factory=dict)
    params: typing.Dict[str, int] = dataclasses.field(default_factory=dict)  # by shape: there is one for every position


class TrainSteps:
    """All runs of one measurement; files go to `folder`."""

    def __init__(self, programs, measured, rounds, deadline, folder, out=sys.stderr):
        self._programs, self._measured = programs, measured
        self._rounds, self._deadline = rounds, deadline
        self._folder = pathlib.Path(folder)
        self._out = out
        self._runs = 0

    def measure(self, with_memory=True):
        measured = self._measured
        timed = [(shape, round, contender) for shape in measured.shapes for round in range(1, self._rounds + 1)
                 for contender in measured.contenders]
        watched = [(shape, contender) for shape in measured.shapes for contender in measured.contenders] \
            if with_memory else []
        progress = Progress([("step", contender.key, shape.key) for shape, _, contender in timed] +
                            [("memory", contender.key, shape.key) for shape, contender in watched], self._out)
        inits = {shape.key: self._save_init(shape) for shape in measured.shapes}
        for shape, round, contender in timed:
            progress.run(("step", contender.key, shape.key),
                         f"{shape.title}, round {round} of {self._rounds}, {contender.title}",
                         lambda c=contender, s=shape: self._time(c, s, inits[s.key]))
        for shape, contender in watched:
            progress.run(("memory", contender.key, shape.key), f"{shape.title}, memory, {contender.title}",
                         lambda c=contender, s=shape: self._watch(c, s))

    def _new_folder(self):
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        return folder

    def _save_init(self, shape):
        path = self._folder / f"init.{shape.key}"
        with processes.Group([contenders.save_init_command(shape, self._programs, path)], self._new_folder()) as group:
            group.wait(self._deadline)
        return path

    def _time(self, contender, shape, init):
        folder = self._new_folder()
        commands = contenders.commands(contender, shape, self._programs, folder, init)
        with processes.Group(commands, folder) as group:
            group.wait(self._deadline)
            result = contenders.read_result(contender, group, folder)
        self.check(contender, shape, result)
        self._measured.steps.setdefault((contender.key, shape.key), []).append(result.step_ms)
        return f"{result.step_ms:.1f} ms"

    def _watch(self, contender, shape):
        """A run of its own: looking at a process's memory stops it for milliseconds."""
        folder = self._new_folder()
        # Without initial parameters from a file: reading them would be the peak of a model that is made in pieces.
        commands = contenders.commands(contender, shape, self._programs, folder)
        with processes.Group(commands, folder) as group:
            with memory.Sampler(group.pids, contender.ranks) as sampler:
                group.wait(self._deadline)
        peak = sampler.peak
        if not peak.samples:
            raise processes.RunError(f"{contender.title}: could not read the memory of its processes; "
                                     "/proc/PID/smaps_rollup needs Linux 4.14. --no-memory leaves this out.")
        self._measured.peaks[contender.key, shape.key] = peak
        return f"{peak.pss / 1e6:,.0f} MB"

    def check(self, contender, shape, result):
        """A benchmark of something else than the same training is worthless."""
        measured = self._measured
        params = measured.params.setdefault(shape.key, result.params)
        known = [other for other in measured.contenders if (other.key, shape.key) in measured.losses]
        # The one that vouches for most losses; of several the first.
        reference = max(known, key=lambda other: other.equal_losses, default=contender)
        if result.params != params:
            raise processes.RunError(f"{contender.title} trains {result.params:,} parameters, {reference.title} "
                                     f"{params:,}: this is not the same model")
        for other in {reference.key: reference, contender.key: contender}.values():
            expected = measured.losses.setdefault((other.key, shape.key), result.losses)
            count = contender.equal_losses if other == contender else min(contender.equal_losses, other.equal_losses)
            difference = summary.loss_difference(expected, result.losses, count)
            if difference:
                raise processes.RunError(
                    f"{contender.title} ({shape.title}) does not train as {other.title} does: {difference}. Steps of "
                    "different trainings are not compared. tools/compare_with_pytorch.py shows more of the losses.")
