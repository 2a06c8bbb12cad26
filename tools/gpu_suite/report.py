"""What programs wrote, as one JSON document and as Markdown."""
import json

PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "timed out"
# What Google Benchmark says of a benchmark besides its counters.
_NO_FIGURES = {"name", "run_name", "run_type", "family_index", "per_family_instance_index", "repetitions",
               "repetition_index", "threads", "iterations", "real_time", "cpu_time", "time_unit", "error_occurred",
               "error_message", "aggregate_name", "aggregate_unit", "label"}
PEER_FIGURES = ("step_ms", "min_ms", "tok_s", "peak_device_mb", "params", "loss0", "loss")
# What has to hold: (benchmark, figure, least, most).
TARGETS = (
    ("train_step/bf16", "of_plain", None, 1.02),
    ("train_step/bf16", "reserved_of_plan", 0.98, 1.02),
    ("host_cost", "added_us_per_unit", None, 30),
    ("offload/stepped_on_device/bf16", "of_resident", 0.42, None),
    ("offload/stepped_on_host/fp32", "of_resident", 0.42, None),
)


def test_cases(text):
    """Of a report that a GoogleTest program wrote."""
    found = []
    for suite in json.loads(text)["testsuites"]:
        for case in suite["testsuite"]:
            failures = [failure["failure"] for failure in case.get("failures", ())]
            if failures:
                outcome = FAILED
            elif case.get("result") == "SKIPPED" or case.get("status") == "NOTRUN":
                outcome = SKIPPED
            else:
                outcome = PASSED
            found.append({"name": f"{suite['name']}.{case['name']}", "outcome": outcome,
                          "message": "\n".join(failures)})
    return found


def _closed(text):
    """A Google Benchmark report as an object. It is written benchmark by benchmark: of a program that was stopped, what is
    there."""
    try:
        return json.loads(text)
    except ValueError:
        end = "\n    }"  # of a benchmark
        whole, _, _ = text.rpartition(end)
        return json.loads(whole + end + "\n  ]\n}")


def benchmarks(text):
    """Of a report that a Google Benchmark program wrote. Its names without what tells how they were run."""
    found = []
    for entry in _closed(text)["benchmarks"]:
        name = "/".join(part for part in entry["name"].split("/")
                        if not part.startswith("iterations:") and part not in ("manual_time", "real_time"))
        if entry.get("error_occurred"):
            found.append({"name": name, "outcome": FAILED, "message": entry.get("error_message", ""), "figures": {}})
            continue
        figures = {key: value for key, value in entry.items()
                   if key not in _NO_FIGURES and isinstance(value, (int, float))}
        figures.setdefault(f"time_{entry['time_unit']}", entry["real_time"])
        found.append({"name": name, "outcome": PASSED, "message": "", "figures": figures})
    return found


def peer_cases(text, name):
    """Of a peer program's output, whose last line with an object counts."""
    line = [line for line in text.splitlines() if line.startswith("{")][-1]
    figures = {key: float(value) for key, value in json.loads(line).items()
               if isinstance(value, (int, float)) and not isinstance(value, bool)}
    return [{"name": name, "outcome": PASSED, "message": "", "figures": figures}]


def outcome_of(cases, exit_code, timed_out):
    """Of a whole program."""
    if timed_out:
        return TIMED_OUT
    if exit_code != 0 or not cases or any(case["outcome"] == FAILED for case in cases):
        return FAILED
    return PASSED


def targets(results):
    """[(text, value, whether it holds)] for what was measured of TARGETS."""
    figures = {case["name"]: case["figures"] for program in results["programs"] if program["kind"] == "benchmark"
               for case in program["cases"]}
    found = []
    for name, figure, least, most in TARGETS:
        value = figures.get(name, {}).get(figure)
        if value is None:
            continue
        bounds = ([f">= {least}"] if least is not None else []) + ([f"<= {most}"] if most is not None else [])
        holds = (least is None or value >= least) and (most is None or value <= most)
        found.append((f"{name}: {figure} {' and '.join(bounds)}", value, holds))
    return found


def number(value):
    """Four significant digits, whole where they are large."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _cell(text):
    return " ".join(str(text).replace("|", "\\|").split())


def _table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(map(_cell, row)) + " |" for row in rows] + [""]


def _failures(program):
    lines = []
    broken = [case for case in program["cases"] if case["outcome"] == FAILED]
    for case in broken:
        lines += [f"- {case['name']}", "", "  ```"]
        lines += [f"  {line}" for line in case["message"].splitlines()[:40]] + ["  ```", ""]
    if program["outcome"] != PASSED and not broken:
        lines += [f"- {program['name']}: {program['outcome']}, exit code {program['exit_code']}; it ended with", "",
                  "  ```"]
        lines += [f"  {line}" for line in program["output_tail"].splitlines()[-40:]] + ["  ```", ""]
    return lines


def _tests(programs):
    rows = []
    for program in programs:
        count = lambda outcome: sum(case["outcome"] == outcome for case in program["cases"])
        rows.append((program["name"], program["outcome"], count(PASSED), count(FAILED), count(SKIPPED),
                     f"{program['seconds']:.0f} s"))
    return _table(("test", "outcome", "passed", "failed", "skipped", "time"), rows)


def _figures(program):
    lines = [f"### {program['name']}", ""]
    if program["outcome"] == TIMED_OUT:
        lines += [f"Stopped after {program['seconds']:.0f} s.", ""]
    # Benchmarks with the same figures share a table.
    groups = {}
    for case in program["cases"]:
        groups.setdefault(tuple(sorted(case["figures"])), []).append(case)
    for names, cases in groups.items():
        if names:
            lines += _table(("benchmark",) + names,
                            [(case["name"], *(number(case["figures"][name]) for name in names)) for case in cases])
    return lines


def markdown(results):
    machine = results["machine"]
    tests = [program for program in results["programs"] if program["kind"] == "test"]
    measured = [program for program in results["programs"] if program["kind"] == "benchmark"]
    lines = ["# GPU tests and benchmarks", ""]
    lines += _table(("", ""), sorted(machine.items()))
    checked = targets(results)
    if checked:
        lines += ["## Targets", ""] + _table(
            ("target", "measured", ""), [(text, number(value), "yes" if holds else "**no**")
                                         for text, value, holds in checked])
    if tests:
        lines += ["## Tests", ""] + _tests(tests)
    if measured:
        lines += ["## Benchmarks", ""]
        for program in measured:
            lines += _figures(program)
    peers = [case for program in results["programs"] if program["kind"] == "peer" for case in program["cases"]]
    if peers:
        names = [name for name in PEER_FIGURES if all(name in case["figures"] for case in peers)]
        lines += ["## PyTorch, the same model", ""] + _table(
            ["", *names], [(case["name"], *(number(case["figures"][name]) for name in names)) for case in peers])
    failures = [line for program in results["programs"] for line in _failures(program)]
    if failures:
        lines += ["## What failed", ""] + failures
    return "\n".join(lines).rstrip("\n") + "\n"
