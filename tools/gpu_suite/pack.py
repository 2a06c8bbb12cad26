#!/usr/bin/env python3
"""Packs the GPU tests and benchmarks and the Llama programs into a folder, and runs them where a GPU is.

  tools/gpu_suite/pack.py OUT        where Bazel and the CUDA toolkit are; a GPU is not needed
  OUT/run --out=DIR --budget=540     where a GPU is, with LibTorch 2.11.0 for CUDA; goes on where an earlier run has ended
"""
import argparse
import contextlib
import datetime
import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PASSED, FAILED, SKIPPED, TIMED_OUT, CUT_OFF = "passed", "failed", "skipped", "timed out", "cut off"
LIMITS_S = {"test": 90, "train": 90, "generate": 90, "benchmark": 240, "peer": 180}
LEAST_S = 10  # With less of the budget left nothing is begun.
PROVIDED = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|c10|c10_cuda|torch|torch_cpu|torch_cuda|cudart|cupti"
                      r"|nccl)|ld-linux-.*)\.so(\.\d+)*")  # By the system, LibTorch and what comes with it.
GPU_BENCHMARKS, DEVICE_OPS = "//benchmarks:gpu_benchmarks", "//benchmarks:device_ops_benchmark"
TRAIN, GENERATE = "//examples/llama:train_cuda", "//examples/llama:generate_cuda"
OPERATORS_TEST = "//device_ops/cuda:operators_test"
FIRST_TESTS = ("//third_party/cuda:smoke_test", OPERATORS_TEST, "//fsdp/tests/device:cuda_training_test")
SANITIZER = shutil.which("compute-sanitizer", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")
# Cases of GPU_BENCHMARKS; what tells most comes first.
CASES = ("train_step/bf16", "sharded_step/bf16_over_fp32", "host_cost", "(host_cost|train_step/bf16)/captured",
         "fused_adamw/.*", "full_finetune/states_on_host", "sharded_step/bf16_over_fp32/all_on_host", "offload/.*",
         "train_step/fp32", "train_step/bf16/8_ranks", "(all_gather|reduce_scatter)/.*", "train_step/(bf16|fp32)/checkpointing",
         "full_finetune/all_on_host")
# PyTorch's side: which case of ours it is compared with, and flags.
PEERS = ("peer_gpt.py", "peer_flags.py")
BILLION = " --layers=20 --dim=2048 --heads=16 --seq=1024 --batch=4 --vocab=8192"
SMALL = " --layers=50 --dim=64 --heads=4 --seq=16 --batch=1 --vocab=64"
SEVEN_BILLION = (" --layers=34 --dim=4096 --heads=32 --seq=1024 --batch=16 --vocab=8192 --micro-batches=2 --recompute "
                 "--clip=1 --steps=2 --warmup=1")
PYTORCH = {
    "PyTorch, bf16": ("train_step/bf16", "--impl=none --pure-bf16" + BILLION),
    "FSDP2, bf16": ("train_step/bf16", "--impl=fsdp2 --pure-bf16" + BILLION),
    "FSDP1, bf16": ("train_step/bf16", "--impl=fsdp1 --pure-bf16" + BILLION),
    "FSDP2, bf16 over fp32": ("sharded_step/bf16_over_fp32", "--impl=fsdp2 --bf16" + BILLION),
    "PyTorch, 50 small blocks": ("host_cost", "--impl=none" + SMALL),
    "FSDP2, 50 small blocks": ("host_cost", "--impl=fsdp2" + SMALL),
    "FSDP2, bf16 over fp32, CPUOffloadPolicy": ("sharded_step/bf16_over_fp32/all_on_host",
                                                "--impl=fsdp2 --bf16 --cpu-offload --steps=4 --warmup=1" + BILLION),
    "PyTorch, fp32": ("train_step/fp32", "--impl=none" + BILLION),
    "FSDP2, fp32": ("train_step/fp32", "--impl=fsdp2" + BILLION),
    "FSDP2, 7B, CPUOffloadPolicy": ("full_finetune/all_on_host", "--impl=fsdp2 --bf16 --cpu-offload" + SEVEN_BILLION)}
# What a dry run adds: small, and without a GPU. Flags that come later win.
DRY = {
    GPU_BENCHMARKS: "--device=privateuseone --turns=2 --layers=3 --dim=8 --heads=2 --seq=8 --batch=2 --vocab=16 --units=2 "
                    "--large_layers=3 --large_dim=8 --large_heads=2 --large_batch=2 --matrix=8 --rows=4 --largest_mib=1",
    DEVICE_OPS: "--benchmark_filter=^cpu/copy --benchmark_min_time=0.001", TRAIN: "--device=cpu", GENERATE: "--device=cpu",
    PEERS[0]: "--device=cpu --layers=2 --dim=16 --heads=2 --seq=8 --batch=2 --vocab=16 --steps=2 --warmup=1 --threads=1"}
# A model whose tokens are bytes; training begins with random parameters.
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}


def output_of(*command, **options):
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True, text=True,
                              **options).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"'{' '.join(command)[:200]}' failed: {getattr(error, 'strerror', '') or f'exit code {error.returncode}'}")


def file_of(label):
    return label[2:].replace("/", ".").replace(":", ".")


def foreign_libraries(dynamic_section):
    """Those that `readelf -d` names and the other machine may lack."""
    return [name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic_section) if not PROVIDED.fullmatch(name)]


def fill(out, programs, **manifest):
    """Makes `out` of the programs, {label: file}."""
    (out / "bin").mkdir(parents=True)
    for label, source in programs.items():
        target = out / "bin" / file_of(label)
        shutil.copyfile(source, target)
        target.chmod(0o755)
        output_of("strip", "--strip-all", str(target))
        foreign = foreign_libraries(output_of("readelf", "-dW", str(target)))
        if foreign:
            sys.exit(f"{source} needs {', '.join(foreign)}, which a machine with LibTorch for CUDA may lack")
    for name in PEERS:
        shutil.copyfile(ROOT / "benchmarks" / "peers" / name, out / name)
    shutil.copyfile(__file__, out / "run")
    (out / "run").chmod(0o755)
    (out / "manifest.json").write_text(json.dumps({"labels": sorted(programs), **manifest}, indent=1) + "\n")


def pack(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="a folder that is not there")
    parser.add_argument("--bazel-flags", default="-c opt --config=cuda --define=fsdp_cuda_archs=90", metavar="FLAGS")
    flags = parser.parse_args(argv)
    if flags.out.exists():
        sys.exit(f"{flags.out} is there: name a new folder")
    bazel, build = str(ROOT / "bazelw"), flags.bazel_flags.split()
    tests = r'attr(tags, "\bgpu\b", kind("cc_test rule", //...))'
    labels = output_of(bazel, "query", "--noshow_progress", tests, cwd=ROOT).split()
    labels += [GPU_BENCHMARKS, DEVICE_OPS, TRAIN, GENERATE]
    output_of(bazel, "build", *build, *labels, cwd=ROOT)
    folder = pathlib.Path(output_of(bazel, "info", *build, "--noshow_progress", "bazel-bin", cwd=ROOT).strip())
    fill(flags.out, {label: folder / label[2:].replace(":", "/") for label in labels}, build=flags.bazel_flags,
         sources=output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty").strip())
    size = sum(path.stat().st_size for path in flags.out.rglob("*") if path.is_file())
    print(f"{flags.out}: {len(labels)} programs, {size / 2**20:.1f} MiB")


def find_libtorch(flags):
    """(version, folders of libraries), also of those that pip installs beside it."""
    find = "import importlib.util as u; t = u.find_spec('torch'); print(t.submodule_search_locations[0] if t else '')"
    folder = (flags.libtorch or pathlib.Path(output_of(flags.python, "-c", find).strip())).resolve()
    texts = [path.read_text() for path in (folder / "version.py", folder / "build-version") if path.exists()]
    version = re.search(r"\d+\.\d+\.\d+[+\w]*", texts[0])[0] if texts else "unknown"
    if not (folder / "lib" / "libtorch_cuda.so").exists() or not re.fullmatch(r"2\.11\.0(\+cu13\d)?", version):
        sys.exit(f"{folder} has version {version}; needed is LibTorch 2.11.0 for CUDA 13: see --python and --libtorch")
    return version, [str(folder / "lib"), *sorted(map(str, folder.parent.glob("nvidia/*/lib")))]


def plan(labels, flags):
    """[{"name", "kind", "command"}] in order. "{written}" in a command is the file that a program reports to."""
    llama, entries = flags.out / "llama", []

    def add(name, kind, label, *arguments, before=()):
        if label in labels or kind == "peer":
            program = FOLDER / (label if kind == "peer" else "bin/" + file_of(label))
            dry = DRY.get(label, "").split() if flags.dry_run else []
            entries.append({"name": name, "kind": kind, "command": [*before, str(program), *arguments, *dry]})

    for label in [*FIRST_TESTS, *(label for label in labels if label not in FIRST_TESTS)]:
        if label.endswith("_test"):
            add(label[2:], "test", label)
    if SANITIZER:
        add("operators_test under compute-sanitizer", "test", OPERATORS_TEST,
            before=(SANITIZER, "--tool=memcheck", "--error-exitcode=9", "--print-limit=10"))
    add("llama: train", "train", TRAIN, f"--model={llama}", "--from_scratch", f"--data={FOLDER / 'run'}", "--ranks=1",
        "--seq=64", "--batch=4", "--steps=8", "--warmup=2", "--lr=1e-3", "--threads=1", "--device=cuda", "--metrics={written}",
        f"--export={llama / 'trained'}")
    add("llama: generate", "generate", GENERATE, f"--model={llama / 'trained'}", "--prompt=def ", "--max_tokens=32",
        "--temperature=0", "--threads=1", "--device=cuda")
    written = ("--benchmark_out={written}", "--benchmark_out_format=json")
    for case in CASES:
        add(case, "benchmark", GPU_BENCHMARKS, *written, f"--benchmark_filter=^({case})/iterations")
    add("device_ops", "benchmark", DEVICE_OPS, *written, "--benchmark_filter=^cuda/")
    for name, (_, arguments) in PYTORCH.items():
        add(name, "peer", PEERS[0], "--device=cuda", "--threads=0", "--steps=10", "--warmup=3", *arguments.split(),
            before=(flags.python,))
    return entries


def case_of(name, outcome=PASSED, message="", figures=None):
    return {"name": name, "outcome": outcome, "message": message, "figures": figures or {}}


def benchmark_cases(text):
    if not text.rstrip().endswith("\n}"):  # Of a program that was stopped in the midst.
        text = text.rpartition("\n    }")[0] + "}]}"
    for one in json.loads(text)["benchmarks"]:
        failed = one.get("error_occurred", False)
        figures = {key: value for key, value in one.items() if isinstance(value, (int, float)) and not re.fullmatch(
            "family_index|per_family_instance_index|repetition.*|threads|iterations|real_time|cpu_time", key)}
        yield case_of(re.sub(r"/(iterations:\d+|manual_time|real_time)", "", one["name"]), FAILED if failed else PASSED,
                      one.get("error_message", ""), {} if failed else {"time_" + one["time_unit"]: one["real_time"], **figures})


def cases_of(entry, written, said):
    try:
        if entry["kind"] == "test":
            ended = re.findall(r"(?s)\[ RUN      \] (\S+)\n(.*?)(?:\[ +(OK|FAILED|SKIPPED) +\] \1\b|\Z)", said)
            return [case_of(name, {"OK": PASSED, "SKIPPED": SKIPPED}.get(mark, FAILED), message + ("" if mark else "has not ended"))
                    for name, message, mark in ended]
        if entry["kind"] == "benchmark":
            return list(benchmark_cases(written.read_text()))
        if entry["kind"] == "train":
            last = json.loads(written.read_text().splitlines()[-1])
            figures = {"last_loss": float(last["loss"]), "tokens_per_s": last["tokens_per_second"]}
        elif entry["kind"] == "generate":
            figures = {"tokens_per_s": float(re.search(r"then: .* \((\S+) tokens/s\)", said)[1])}
        else:
            last = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
            figures = {key: value for key, value in last.items() if isinstance(value, (int, float))}
        return [case_of(entry["name"], PASSED if all(map(math.isfinite, figures.values())) else FAILED, str(figures), figures)]
    except (OSError, ValueError, LookupError, TypeError):
        return []  # Its exit code and output say why.


def run_one(entry, limit_s, libraries, out):
    if entry["kind"] == "peer":  # Its torch finds its libraries itself.
        more = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    else:
        more = {"LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")}
    if entry["kind"] == "train":  # Exports only to what is not there.
        shutil.rmtree(out / "llama", ignore_errors=True)
        (out / "llama").mkdir()
        (out / "llama" / "config.json").write_text(json.dumps(LLAMA))
    with tempfile.TemporaryDirectory(prefix="gpu_suite.") as scratch:
        written, output = pathlib.Path(scratch, "report.json"), pathlib.Path(scratch, "output")
        command = ["env", *(argument.replace("{written}", str(written)) for argument in entry["command"])]
        begin, outcome = time.monotonic(), None
        with open(output, "wb") as file:  # `env` says itself what does not start.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=scratch,
                                       start_new_session=True, env={**os.environ, "TEST_TMPDIR": scratch, **more})
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            outcome = TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Also of all that it has started.
            process.wait()
        said = output.read_text(errors="replace")
        cases = cases_of(entry, written, said)
    if entry["command"][0] == SANITIZER and re.search("Device not supported|Unable to find injection library", said):
        outcome = SKIPPED
    bad = process.returncode != 0 or not cases or any(case["outcome"] == FAILED for case in cases)
    return {"name": entry["name"], "outcome": outcome or (FAILED if bad else PASSED), "exit_code": process.returncode,
            "seconds": round(time.monotonic() - begin, 1), "cases": cases, "tail": said[-8000:]}


def table(*rows):
    def cell(value):
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return " ".join(str(value).replace("|", "\\|").split())

    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:], ""]


def beside_pytorch(figures):
    for case in dict.fromkeys(case for case, _ in PYTORCH.values()):
        ours = figures.get(case, {})
        rows = [("ours", ours, "ms tokens_per_s peak_MB"), ("plain LibTorch", ours, "plain_ms - plain_peak_MB")]
        rows += [(name, figures.get(name, {}), "step_ms tok_s peak_device_mb") for name in PYTORCH if PYTORCH[name][0] == case]
        for name, found, keys in rows:
            values = [found.get(key, "") for key in keys.split()]
            if values[0]:
                yield case, name, *values, values[0] / ours["ms"] if "ms" in ours else ""


def render(machine, results, left):
    """The report for people."""
    broken = [result for result in results if result["outcome"] not in (PASSED, SKIPPED)]
    figures = {case["name"]: case["figures"] for result in results for case in result["cases"] if case["figures"]}
    lines = ["# GPU tests and benchmarks", "", *table(("", ""), *machine.items()),
             f"{len(results)} programs ran, {len(broken)} of them failed.", ""]
    lines += [f"Not run or cut off, for another run with the same `--out`: {', '.join(left)}.", ""] if left else []
    lines += table(("program", "outcome", "exit code", PASSED, FAILED, SKIPPED, "seconds"), *(
        (result["name"], result["outcome"], result["exit_code"], *(
            sum(case["outcome"] == outcome for case in result["cases"]) for outcome in (PASSED, FAILED, SKIPPED)),
         result["seconds"]) for result in results))
    lines += ["## Beside PyTorch", "", *table(("case", "", "step, ms", "tokens/s", "peak MB of the GPU", "step over ours"),
                                              *beside_pytorch(figures)), "## All figures", ""]
    for keys in dict.fromkeys(map(tuple, figures.values())):  # Cases with the same figures share a table.
        lines += table(("", *keys), *((name, *found.values()) for name, found in figures.items() if tuple(found) == keys))
    lines += ["## What failed", ""] if broken else []
    for result in broken:
        lines += [f"- {result['name']}: {result['outcome']}, exit code {result['exit_code']}"]
        reasons = [(case["name"], case["message"]) for case in result["cases"] if case["outcome"] == FAILED]
        for title, text in reasons or [("it ended with", result["tail"])]:
            lines += [f"  - {title}", "", "    ```", *(f"    {line}" for line in text.splitlines()[-40:]), "    ```", ""]
    return "\n".join(lines)


def run(argv):
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description="Fills --out with results.json and report.md. Exit code 0: all passed.")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_results"), help="where results go")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="for all together")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs whose name this is found in, also again")
    parser.add_argument("--libtorch", type=pathlib.Path, help="the folder with lib/libtorch_cuda.so, if not --python's")
    parser.add_argument("--python", default=sys.executable, help="one that has torch",
                        type=lambda name: os.path.abspath(shutil.which(name) or name))
    parser.add_argument("--dry-run", action="store_true", help="of a folder whose programs need no GPU, with small models")
    flags = parser.parse_args(argv)
    flags.out = flags.out.resolve()
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    gpu, version, libraries, entries = "none, a dry run: figures mean nothing", "", [], plan(manifest["labels"], flags)
    if not flags.dry_run:
        gpu = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").strip()
        version, libraries = find_libtorch(flags)
        with_torch = subprocess.run([flags.python, "-c", "import torch; torch.zeros(1, device='cuda')"], check=False,
                                    stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
        entries = [entry for entry in entries if with_torch or entry["kind"] != "peer"]
    machine = {"GPU, memory, driver": gpu, "LibTorch": version, "date": datetime.date.today().isoformat(),
               "CPU cores": os.cpu_count(), "sources": manifest["sources"], "build": manifest["build"]}
    flags.out.mkdir(parents=True, exist_ok=True)
    file = flags.out / "results.json"
    former = json.loads(file.read_text()) if file.exists() else {"programs": []}
    done = {result["name"]: result for result in former["programs"] if former["machine"]["sources"] == manifest["sources"]}
    for path in (FOLDER / "bin").iterdir():
        path.chmod(0o755)  # Its mode may have been lost on the way.

    def left():
        return [entry["name"] for entry in entries if done.get(entry["name"], {"outcome": CUT_OFF})["outcome"] == CUT_OFF]

    chosen = [entry for entry in entries if re.search(flags.only, entry["name"]) and (flags.only or entry["name"] in left())]
    if flags.only and not chosen:
        sys.exit(f"no program's name has '{flags.only}' in it: {', '.join(entry['name'] for entry in entries)}")
    for number, entry in enumerate(chosen, 1):
        left_s = flags.budget - (time.monotonic() - begin)
        if left_s < LEAST_S:
            print(f"the budget is spent; the next run has {len(chosen) - number + 1} more to do")
            break
        print(f"[{number}/{len(chosen)}] {entry['name']}", flush=True)
        limit_s = LIMITS_S[entry["kind"]]
        result = run_one(entry, min(limit_s, left_s), libraries, flags.out)
        if result["outcome"] == TIMED_OUT and left_s < limit_s:
            result["outcome"] = CUT_OFF  # To be run again.
        print(f"    {result['outcome']} in {result['seconds']:.0f} s", flush=True)
        done[entry["name"]] = result
        results = [done[entry["name"]] for entry in entries if entry["name"] in done]
        for name, text in (("results.json", json.dumps({"machine": machine, "programs": results}, indent=1)),
                           ("report.md", render(machine, results, left()))):
            (flags.out / f"{name}.new").write_text(text + "\n")
            os.replace(flags.out / f"{name}.new", flags.out / name)
    print(flags.out / "report.md")
    good = {name for name, result in done.items() if result["outcome"] in (PASSED, SKIPPED)}
    return 0 if all(entry["name"] in good for entry in entries if re.search(flags.only, entry["name"])) else 1


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, lambda number, _: sys.exit(128 + number))
    sys.exit(run(sys.argv[1:]) if (FOLDER / "manifest.json").exists() else pack(sys.argv[1:]))
