"""What trials have shown, for people (Markdown) and for programs (JSON)."""
from __future__ import annotations

import collections
import dataclasses
import statistics
from typing import Any, Dict, List, Optional

from trials import Result


@dataclasses.dataclass
class Summary:
    """Of one fault with one backend."""
    fault: str
    backend: str
    trials: int = 0
    skipped: int = 0
    hangs: int = 0
    left: int = 0  # trials that have left something
    defects: int = 0  # trials with defects
    outcomes: Dict[str, int] = dataclasses.field(default_factory=dict)  # trials by what has become of the job
    detection_s: Optional[List[float]] = None  # least, median, most
    took_s: float = 0  # a trial, as a mean


def summarize(results: List[Result]) -> List[Summary]:
    groups: Dict[Any, List[Result]] = collections.defaultdict(list)
    for result in results:
        groups[(result.fault, result.backend)].append(result)
    summaries = []
    for (fault, backend), group in sorted(groups.items()):
        ran = [result for result in group if not result.skipped]
        times = sorted(result.detection_s for result in ran if result.detection_s is not None)
        summaries.append(Summary(
            fault, backend, len(ran), len(group) - len(ran), sum(result.hang for result in ran),
            sum(bool(result.left) for result in ran), sum(bool(result.defects) for result in ran),
            dict(sorted(collections.Counter(result.outcome() for result in ran).items())),
            [times[0], statistics.median(times), times[-1]] if times else None,
            round(statistics.mean(result.took_s for result in ran), 2) if ran else 0))
    return summaries


def from_json(data: Dict[str, Any]) -> List[Result]:
    """The trials that to_json() has written."""
    return [Result(**trial) for trial in data["trials"]]


def to_json(results: List[Result], about: Dict[str, str]) -> Dict[str, Any]:
    return {"about": about, "summary": [dataclasses.asdict(summary) for summary in summarize(results)],
            "trials": [dataclasses.asdict(result) for result in results]}


def _seconds(times: Optional[List[float]]) -> str:
    return " / ".join(f"{time:.2f}" for time in times) if times else "-"


def to_markdown(results: List[Result], about: Dict[str, str]) -> str:
    lines = ["# Faults", ""] + [f"- {name}: {value}" for name, value in about.items()] + [
        "", "Seconds from the fault to the end of the job: least / median / most; of a job that survives until it is done.",
        "", "| fault | backend | trials | outcomes | seconds | hangs | left something | defects |",
        "|---|---|---|---|---|---|---|---|"]
    for one in summarize(results):
        trials = f"{one.trials}" + (f" ({one.skipped} skipped)" if one.skipped else "")
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in one.outcomes.items()) or "-"
        lines.append(f"| {one.fault} | {one.backend} | {trials} | {outcomes} | {_seconds(one.detection_s)} | {one.hangs} | "
                     f"{one.left} | {one.defects} |")
    total = [sum(counts) for counts in zip(*((one.trials, one.hangs, one.left, one.defects) for one in summarize(results)))]
    if total:
        lines.append(f"| all | | {total[0]} | | | {total[1]} | {total[2]} | {total[3]} |")
    lines += ["", "## Defects", ""]
    wrong = [result for result in results if result.defects]
    for result in wrong:
        lines += [f"### {result.fault}, {result.backend}, seed {result.seed}", "", f"{result.detail}; codes {result.codes}", ""]
        lines += [f"- {defect}" for defect in result.defects]
        lines += ["", "```text", result.output.strip(), "```", ""]
    if not wrong:
        lines += ["None.", ""]
    skipped = sorted({(result.fault, result.skipped) for result in results if result.skipped})
    if skipped:
        lines += ["## Skipped", ""] + [f"- {fault}: {why}" for fault, why in skipped] + [""]
    lines += ["## What the jobs say", "", "| fault | text, numbers as N | trials |", "|---|---|---|"]
    texts = collections.Counter((result.fault, error) for result in results for error in result.errors)
    for (fault, error), count in sorted(texts.items()):
        lines.append(f"| {fault} | {error.replace('|', chr(92) + '|')} | {count} |")
    return "\n".join(lines) + "\n"
