"""The report for people."""
import report
import targets


def number(value):
    """Four significant digits, whole where they are large."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _cell(text):
    return " ".join(str(text).replace("|", "\\|").split())


def _table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(map(_cell, row)) + " |" for row in rows] + [""]


def _targets(results):
    return ["## Targets", ""] + _table(("", "target", "", "measured", "holds"), [
        (target.number, target.text, targets.bounds_of(target), number(value), holds)
        for target, value, holds in targets.check(results)])


def _comparisons(results):
    compared = targets.compare(results)
    lines = ["## Beside PyTorch", ""] if compared else []
    for title, rows in compared:
        lines += _table((title, "step, ms", "tokens/s", "peak MB of the GPU", "step over ours"),
                        [(name, *(number(value) if value is not None else "" for value in values))
                         for name, *values in rows])
    return lines


def _tests(programs):
    rows = []
    for program in programs:
        count = [sum(case["outcome"] == outcome for case in program["cases"])
                 for outcome in (report.PASSED, report.FAILED, report.SKIPPED)]
        rows.append((program["name"], program["outcome"], *count, f"{program['seconds']:.0f} s"))
    return ["## Tests", ""] + _table(("test", "outcome", "passed", "failed", "skipped", "time"), rows)


def _figures(title, programs):
    lines = [f"### {title}", ""]
    for program in programs:
        if program["outcome"] in (report.TIMED_OUT, report.CUT_OFF):
            lines += [f"{program['name']}: stopped after {program['seconds']:.0f} s.", ""]
    # Cases with the same figures share a table.
    groups = {}
    for case in (case for program in programs for case in program["cases"]):
        groups.setdefault(tuple(sorted(case["figures"])), []).append(case)
    for names, cases in groups.items():
        if names:
            lines += _table(("",) + names,
                            [(case["name"], *(number(case["figures"][name]) for name in names)) for case in cases])
    return lines


def _quote(text, lines):
    return ["  ```"] + [f"  {line}" for line in text[:lines]] + ["  ```", ""]


def failures(program, lines=40):
    """What is known of why a program did not pass; nothing where it did."""
    found = []
    broken = report.failed_cases(program)
    for case in broken:
        found += [f"- {case['name']}", ""] + _quote(case["message"].splitlines(), lines)
    if program["outcome"] not in (report.PASSED, report.SKIPPED) and not broken:
        found += [f"- {program['name']}: {program['outcome']}, exit code {program['exit_code']}; it ended with", ""]
        found += _quote(program["output_tail"].splitlines()[-lines:], lines)
    return found


def render(results, left):
    """`left`: names of the programs that have not run."""
    programs = results["programs"]
    lines = ["# GPU tests and benchmarks", ""] + _table(("", ""), sorted(results["machine"].items()))
    broken = [program["name"] for program in programs if program["outcome"] in (report.FAILED, report.TIMED_OUT)]
    lines += [f"{len(programs)} programs ran, {len(broken)} of them failed" + (f": {', '.join(broken)}." if broken else ".")]
    if left:
        lines += [f"Not run or cut off, for another run with the same `--out`: {', '.join(left)}."]
    lines += [""] + _targets(results) + _comparisons(results)
    tests = [program for program in programs if program["kind"] in ("test", "sanitizer")]
    if tests:
        lines += _tests(tests)
    measured = [program for program in programs if program["kind"] == "benchmark"]
    peers = [program for program in programs if program["kind"] == "peer"]
    lines += ["## All figures", ""] if measured or peers else []
    for program in measured:
        lines += _figures(program["name"], [program])
    lines += _figures("PyTorch", peers) if peers else []
    reasons = [line for program in programs for line in failures(program)]
    if reasons:
        lines += ["## What failed", ""] + reasons
    return "\n".join(lines).rstrip("\n") + "\n"
