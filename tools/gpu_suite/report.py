"""What programs wrote, as cases: their name, outcome, message and figures."""
import json
import re

PASSED, FAILED, SKIPPED, TIMED_OUT = "passed", "failed", "skipped", "timed out"
CUT_OFF = "cut off"  # by the budget or a signal: to be run again
# What Google Benchmark says of a benchmark besides its counters.
_NO_FIGURES = {"name", "run_name", "run_type", "family_index", "per_family_instance_index", "repetitions",
               "repetition_index", "threads", "iterations", "real_time", "cpu_time", "time_unit", "error_occurred",
               "error_message", "aggregate_name", "aggregate_unit", "label"}


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


def test_cases_of_output(text):
    """Of what a GoogleTest program printed that ended before its report was written: its last case has not ended."""
    found, running, said = [], None, []
    for line in text.splitlines():
        match = re.match(r"\[( RUN      |       OK |  FAILED  |  SKIPPED )\] (\S+)(?: \(\d+ ms\))?$", line)
        if not match:
            said.append(line)
            continue
        mark, name = match.group(1).strip(), match.group(2)
        if mark == "RUN":
            running, said = name, []
        elif name == running:
            outcome = {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED}[mark]
            found.append({"name": name, "outcome": outcome, "message": "\n".join(said) if outcome == FAILED else ""})
            running = None
    if running:
        found.append({"name": running, "outcome": FAILED, "message": "\n".join([*said[-40:], "has not ended"])})
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
        if "ms" not in figures:  # the median, of which this is the mean
            figures[f"time_{entry['time_unit']}"] = entry["real_time"]
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


def failed_cases(program):
    return [case for case in program["cases"] if case["outcome"] == FAILED]
