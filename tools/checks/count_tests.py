#!/usr/bin/env python3
"""Counts test cases from Bazel's build event file.

usage: count_tests.py EVENTS.json

Prints "PASSED FAILED SKIPPED" and names the failures on stderr. A test target that left no report of its cases (it was
not built, ran out of time or crashed) counts as one failure.
"""

import json
import sys
import urllib.parse
import urllib.request
import xml.etree.ElementTree


def cases(path):
    """(name, state) of every case in a test.xml."""
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname') or ''}.{case.get('name')}".lstrip(".")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        elif case.find("skipped") is not None or case.get("status") == "notrun":
            yield name, "skipped"
        else:
            yield name, "passed"


def main():
    targets = {}  # label -> the paths of its reports
    statuses = {}
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file:
            event = json.loads(line)
            identity = event.get("id", {})
            if "testResult" in identity:
                reports = targets.setdefault(identity["testResult"]["label"], [])
                for output in event.get("testResult", {}).get("testActionOutput", []):
                    if output["name"] == "test.xml":
                        reports.append(urllib.request.url2pathname(urllib.parse.urlparse(output["uri"]).path))
            elif "testSummary" in identity:
                statuses[identity["testSummary"]["label"]] = event.get("testSummary", {}).get("overallStatus")
            elif "targetCompleted" in identity and not event.get("completed", {}).get("success"):
                # Not for this platform: a target that needs CUDA, built without.
                if event.get("aborted", {}).get("reason") == "SKIPPED":
                    continue
                statuses.setdefault(identity["targetCompleted"]["label"], "FAILED_TO_BUILD")

    count = {"passed": 0, "failed": 0, "skipped": 0}
    for label in sorted(targets.keys() | statuses.keys()):
        failed = 0
        for report in targets.get(label, []):
            try:
                for name, state in cases(report):
                    count[state] += 1
                    if state == "failed":
                        failed += 1
                        print(f"failed: {label} {name}", file=sys.stderr)
            except (OSError, xml.etree.ElementTree.ParseError):
                pass
        status = statuses.get(label, "NO_STATUS")
        if status not in ("PASSED", "FLAKY") and not failed:
            count["failed"] += 1
            print(f"failed: {label} ({status})", file=sys.stderr)
    print(count["passed"], count["failed"], count["skipped"])


if __name__ == "__main__":
    main()
