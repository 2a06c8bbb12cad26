#!/usr/bin/env python3
"""Runs the GPU tests and benchmarks of this folder and writes results.json and report.md.

usage: ./run [--out DIR] [--only REGEX] [FLAGS]

Needs a GPU with its driver and LibTorch 2.11.0 for CUDA: the torch that this Python has, --python's, or --libtorch's.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import driver  # noqa: E402  pylint: disable=wrong-import-position
import libtorch  # noqa: E402  pylint: disable=wrong-import-position
import report  # noqa: E402  pylint: disable=wrong-import-position

EPILOG = "exit codes: 0 all passed, 1 something failed, 2 a flag is wrong, or there is no LibTorch or no GPU"
TAIL = 8000


def log(text):
    print(text, file=sys.stderr, flush=True)


def parse_flags(argv):
    parser = argparse.ArgumentParser(prog="run", description=__doc__, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_results"), help="where results go")
    parser.add_argument("--libtorch", type=pathlib.Path, help="the folder with lib/libtorch_cuda.so")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose name this is found in")
    parser.add_argument("--limit-scale", type=float, default=1, metavar="X", help="multiplies programs' time limits")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="for all together: what runs then is stopped, and what has not begun is left out")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch's FSDP, which needs --python's torch")
    parser.add_argument("--benchmark-flags", default="", metavar="FLAGS",
                        help="for all benchmarks, such as '--turns=5' or '--device=cuda:1'")
    return parser.parse_args(argv)


def gpus():
    """The machine's, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"none found: {error}"
    said = "; ".join(done.stdout.strip().splitlines())
    return said if done.returncode == 0 else f"none found: {said}"


def describe_machine(version, manifest):
    return {"GPU, memory, driver": gpus(), "LibTorch": version, "date": datetime.date.today().isoformat(),
            "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPU cores",
            "sources": manifest["sources"], "build": manifest["build"]}


def wait(process, limit):
    """Whether it ended within `limit` seconds; what is left of it is killed."""
    try:
        process.wait(limit)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def command_of(program, written, python, benchmark_flags):
    if program["kind"] == "peer":
        return [python, str(FOLDER / program["file"]), *program["flags"]]
    path = str(FOLDER / "bin" / program["file"])
    if program["kind"] == "test":
        return [path, f"--gtest_output=json:{written}"]
    own = benchmark_flags.split() if program["takes_device"] else program["flags"]
    return [path, f"--benchmark_out={written}", "--benchmark_out_format=json", *own]


def environment_of(program, libraries, folder):
    """`libraries`: LibTorch's folders, which Python's torch finds by itself."""
    if program["kind"] == "peer":
        return {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port())}
    former = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries + ([former] if former else [])),
            "TEST_TMPDIR": folder}


def cases_of(program, written, output):
    """What the program wrote; nothing where it died before."""
    try:
        if program["kind"] == "peer":
            return report.peer_cases(output, program["name"])
        text = written.read_text(encoding="utf-8")
        return report.test_cases(text) if program["kind"] == "test" else report.benchmarks(text)
    except (OSError, ValueError, LookupError):
        return []


def run_program(program, libraries, flags, left):
    """`left`: seconds of the budget."""
    with tempfile.TemporaryDirectory(prefix="gpu_suite.") as folder:
        written = pathlib.Path(folder, "report.json")
        output = pathlib.Path(folder, "output")
        begin = time.monotonic()
        with open(output, "wb") as file:
            try:
                process = subprocess.Popen(command_of(program, written, flags.python, flags.benchmark_flags),
                                           stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=folder,
                                           start_new_session=True, env=environment_of(program, libraries, folder))
            except OSError as error:
                return {"name": program["name"], "kind": program["kind"], "seconds": 0, "exit_code": 127, "cases": [],
                        "outcome": report.FAILED, "output_tail": f"does not start: {error}"}
            ended = wait(process, min(program["limit_s"] * flags.limit_scale, left))
        said = output.read_text(encoding="utf-8", errors="replace")
        cases = cases_of(program, written, said)
        return {"name": program["name"], "kind": program["kind"], "seconds": time.monotonic() - begin,
                "exit_code": process.returncode, "cases": cases,
                "outcome": report.outcome_of(cases, process.returncode, timed_out=not ended),
                "output_tail": said[-TAIL:]}


def main(argv):
    begin = time.monotonic()
    flags = parse_flags(argv)
    # Ends by an exception, which takes the program along that is running.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    manifest = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
    try:
        folder = (flags.libtorch or libtorch.folder_of(flags.python)).resolve()
        version = libtorch.check(folder)
        chosen = [program for program in manifest["programs"] if re.search(flags.only, program["name"])
                  and not (flags.no_peers and program["kind"] == "peer")]
    except (libtorch.NoLibTorch, re.error) as error:
        log(f"run: {error}")
        return 2
    no_gpu = driver.why_no_gpu()
    if no_gpu:
        log(f"run: {no_gpu}")
        return 2
    if not chosen:
        log(f"run: no program's name has '{flags.only}' in it; there are "
            + ", ".join(program["name"] for program in manifest["programs"]))
        return 2
    flags.out.mkdir(parents=True, exist_ok=True)
    libraries = libtorch.library_folders(folder)
    results = {"machine": describe_machine(version, manifest), "programs": []}
    for index, program in enumerate(chosen, 1):
        left = begin + flags.budget - time.monotonic()
        if left <= 0:
            log(f"left out, the budget is spent: {', '.join(other['name'] for other in chosen[index - 1:])}")
            break
        log(f"[{index}/{len(chosen)}] {program['name']}")
        results["programs"].append(run_program(program, libraries, flags, left))
        log(f"    {results['programs'][-1]['outcome']} in {results['programs'][-1]['seconds']:.0f} s")
        # After each: what has been measured is there whatever comes.
        (flags.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (flags.out / "report.md").write_text(report.markdown(results), encoding="utf-8")
    log(f"{flags.out / 'report.md'}")
    complete = len(results["programs"]) == len(chosen)
    return 0 if complete and all(program["outcome"] == report.PASSED for program in results["programs"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
