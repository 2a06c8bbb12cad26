"""What many runs say together: medians, spread, ratios of the same round, and whether losses agree."""
import dataclasses
import statistics
import typing

# Relative, of the first losses; programs sum in different orders. tools/compare_with_pytorch.py allows the same.
LOSS_TOLERANCE = 1e-5
COMPARED_LOSSES = 4


@dataclasses.dataclass(frozen=True)
class Summary:
    median: float
    least: float
    largest: float
    values: typing.Tuple[float, ...]


def summarize(values):
    """Of at least one value; None of none."""
    values = tuple(values)
    return Summary(statistics.median(values), min(values), max(values), values) if values else None


def paired_ratio(numerator, denominator, scale=1.0):
    """Summary of numerator / (scale * denominator) of each round; None where a side was not measured.

    Both sides of a ratio are neighbours in time, so what slows the machine for a while is in both.
    """
    if not numerator or not denominator:
        return None
    if len(numerator) != len(denominator):
        raise ValueError(f"{len(numerator)} rounds cannot be paired with {len(denominator)}")
    return summarize(a / (scale * b) for a, b in zip(numerator, denominator))


@dataclasses.dataclass(frozen=True)
class Target:
    """`value` is the largest that is allowed, or the least."""
    value: float
    at_least: bool = False

    def holds(self, ratio):
        # As precise as it is printed.
        rounded = round(ratio, 2)
        return rounded >= self.value if self.at_least else rounded <= self.value

    def __str__(self):
        return f"{'>=' if self.at_least else '<='} {self.value:.2f}"


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Of the steps or the memory (PSS) of two contenders."""
    title: str
    numerator: str
    denominator: str
    targets: typing.Dict[str, Target]  # by the key of a shape
    scale: float = 1.0  # of the denominator
    of_memory: bool = False


RATIOS = (
    Ratio("step: ours / floor", "ours", "floor", {"1x64": Target(1.03), "4x256": Target(1.03)}),
    Ratio("step: FSDP1 / ours", "fsdp1", "ours", {"1x64": Target(2.6, at_least=True)}),
    Ratio("step: FSDP2 / ours", "fsdp2", "ours", {"1x64": Target(2.6, at_least=True),
                                                  "4x256": Target(1.6, at_least=True)}),
    Ratio("step: DDP / ours", "ddp", "ours", {"1x64": Target(1.0, at_least=True),
                                              "4x256": Target(1.0, at_least=True)}),
    Ratio("step: ours over Gloo / ours", "ours_gloo", "ours", {}),
    Ratio("step: ours, twice the ranks / (2 x ours)", "ours_twice", "ours",
          {"1x64": Target(1.10), "4x256": Target(1.10)}, scale=2.0),
    Ratio("memory per rank: ours / FSDP2", "ours", "fsdp2", {"1x64": Target(0.40), "4x256": Target(0.40)},
          of_memory=True),
)


def loss_difference(ours, theirs, count):
    """What differs among the first `count` losses; None where they agree."""
    for step, (a, b) in enumerate(zip(ours[:count], theirs[:count]), start=1):
        # Also true where one is infinite or not a number.
        if not abs(a - b) <= LOSS_TOLERANCE * abs(a):
            return f"the loss of step {step} is {b:.7g} instead of {a:.7g}; a relative {LOSS_TOLERANCE:g} is allowed"
    return None
