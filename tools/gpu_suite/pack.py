#!/usr/bin/env python3
"""Packs the GPU tests and benchmarks and the Llama programs into a folder, and runs them where a GPU is.

  tools/gpu_suite/pack.py OUT        where Bazel and the CUDA toolkit are; a GPU is not needed
  OUT/run --out=DIR --budget=540     where a GPU is, with LibTorch 2.11.0 for CUDA; goes on where an earlier run has ended
"""
import argparse
import contextlib
import datetime
import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PASSED, FAILED, SKIPPED, TIMED_OUT, CUT_OFF = "passed", "failed", "skipped", "timed out", "cut off"
LIMITS_S = {"test": 90, "train": 180, "generate": 180, "read": 90, "benchmark": 240, "peer": 180}
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
         "train_step/fp32", "train_step/bf16/8_ranks", "train_step/(bf16|fp32)/checkpointing",
         "full_finetune/all_on_host")
# PyTorch's side: which case of ours it is compared with, and flags.
PEERS = ("peer_gpt.py", "peer_llama.py", "peer_flags.py", "llama_files.py")
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
                    "--large_layers=3 --large_dim=8 --large_heads=2 --large_batch=2 --matrix=8 --rows=4",
    DEVICE_OPS: "--benchmark_filter=^cpu/copy --benchmark_min_time=0.001",
    **dict.fromkeys((TRAIN, GENERATE, PEERS[1]), "--device=cpu --precision=fp32"),
    PEERS[0]: "--device=cpu --layers=2 --dim=16 --heads=2 --seq=8 --batch=2 --vocab=16 --steps=2 --warmup=1 --threads=1"}
# A model whose tokens are bytes; training begins with random parameters.
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
         "tie_word_embeddings": False}
# Llama 3.2 and 3.1. Weights are random, of 8B in no file: it is trained from its config.json.
LLAMA_3 = {**LLAMA, "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
           "max_position_embeddings": 8192, "rope_theta": 500000.0, "bos_token_id": None, "eos_token_id": None}
LLAMAS = {"1.2B": {**LLAMA_3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                   "tie_word_embeddings": True},
          "8B": {**LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}}
BATCH, DRY_BATCH = (4, 2048), (2, 16)  # rows, tokens of each
WARMUP = 3  # steps that are not timed
PROMPT = ",".join(map(str, range(1, 17)))
ADAPTERS, GENERATED = "--lora_rank=16 --lora_alpha=32", f"--max_tokens=256 --tokens={PROMPT}"
LINES = "--tokens=- --batch"
FSDP2, COMPILED = "--impl=fsdp2", "--impl=fsdp2 --compile=inductor"
# Rows of a group are compared with its "ours": {group: (flags of all rows, {row: flags})}. A group begins with its model.
# A row whose flags a program does not know is left out. "cold": the file is not in the page cache.
BESIDE_TRANSFORMERS = {
    "1.2B": ("", {"ours": "", "ours, captured": "--capture", "ours, offload=cpu": "--offload=cpu",
                  "ours, offload=ssd": "--offload=ssd --offload_dir=.", "transformers, all bf16": "", "FSDP2": FSDP2,
                  "FSDP2, compiled": COMPILED}),
    "1.2B, recomputing": ("--recompute", {"ours": "", "ours, captured": "--capture", "FSDP2": FSDP2,
                                          "FSDP2, compiled": COMPILED}),
    "1.2B, LoRA": (ADAPTERS, {"ours": "", "ours, int8": "--base=int8", "PEFT": ""}),
    "1.2B, LoRA, recomputing": (ADAPTERS + " --recompute", {"ours": "", "ours, int8": "--base=int8", "PEFT": ""}),
    "8B, LoRA": (ADAPTERS, {"ours": "", "PEFT": ""}),
    "8B, LoRA, recomputing": (ADAPTERS + " --recompute", {"ours": "", "PEFT": ""}),
    "1.2B, one step": ("--steps=1", {"its file, cold": "", "ours, cold": "", "FSDP2, cold": FSDP2, "its file": "", "ours": "",
                                     "FSDP2": FSDP2}),
    "1.2B, generating": (GENERATED, {"ours": "", "transformers": "--batch=1"}),
    "1.2B, generating 8 rows": (GENERATED, {"ours": LINES, "transformers": "--batch=8"}),
    "1.2B, generating 64 rows": (GENERATED, {"ours": LINES, "transformers": "--batch=64"})}
# What ours has to reach: group, row, figure, of ours over the row's. Each "ours" runs first and again last; the worse counts.
BOUNDS = (("1.2B", "FSDP2, compiled", "tokens_per_s", ">=", 1.05),
          ("1.2B", "FSDP2, compiled", "peak_allocated_mib", "<=", 0.75),
          ("1.2B, recomputing", "FSDP2, compiled", "tokens_per_s", ">=", 1.2),
          ("1.2B, LoRA, recomputing", "PEFT", "tokens_per_s", ">=", 1.2),
          ("8B, LoRA, recomputing", "PEFT", "tokens_per_s", ">=", 1.2),
          *((f"1.2B, generating{rows}", "transformers", "tokens_per_s", ">=", 1.5) for rows in ("", " 8 rows", " 64 rows")))
AGAIN = "ours, again"
# What says that a program cannot do here what it is asked for.
NOT_HERE = {SANITIZER: "Device not supported|Unable to find injection library",
            **dict.fromkeys(("train", "generate"), "Unknown command line flag|--capture needs --device|"
                            "No module named '(transformers|peft)'")}


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


def write_tiny(folder):
    """Anew, since a program exports only to what is not there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))


def write_llama(folder, config, batch, cold):
    import llama_files
    weights = folder.name != "8B"
    llama_files.write(folder, config, *batch, weights)
    if cold:
        with open(folder / "model.safetensors", "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plan_llamas(add, flags):
    """Ours first, then the others, and ours again."""
    batch = DRY_BATCH if flags.dry_run else BATCH
    rows = [(group, row, f"{of_group} {more}") for group, (of_group, of_row) in BESIDE_TRANSFORMERS.items()
            for row, more in of_row.items()]
    rows.sort(key=lambda one: not one[1].startswith("ours"))
    rows += [(group, AGAIN, more) for group, row, more in rows if row == "ours"]
    for group, row, more in rows:
        model, ours, generates = group.split(",")[0], row.startswith("ours"), "generating" in group
        folder = flags.out / "models" / model
        prepare = functools.partial(write_llama, folder, LLAMA if flags.dry_run else LLAMAS[model], batch, "cold" in row)
        name, common = f"Llama {group}: {row}", [f"--model={folder}", "--threads=0", "--device=cuda", "--precision=bf16"]
        if "file" in row:
            add(name, "read", "dd", f"if={folder / 'model.safetensors'}", "of=/dev/null", "bs=8M", prepare=prepare)
            continue
        if not generates:
            common += [f"--data={folder}.bin", f"--batch={batch[0]}", f"--seq={batch[1]}", f"--steps={WARMUP + 10}",
                       "--lr=1e-4", "--metrics={written}"]
        if ours:
            common += ["--temperature=0"] if generates else ["--ranks=1", "--warmup=0", "--lr_floor=1"]
            common += ["--from_scratch"] if model == "8B" else []
        before = () if ours else (flags.python,)
        if ours and group.endswith(" rows"):
            before = ("sh", "-c", f'yes {PROMPT} | head -{group.split()[-2]} | "$0" "$@"')
        add(name, "generate" if generates else "train", (GENERATE if generates else TRAIN) if ours else PEERS[1], *common,
            *more.split(), before=before, prepare=prepare)


def plan(labels, flags):
    """[{"name", "kind", "command", "peer", "prepare"}] in order. "{written}" in a command is the file that a program reports to."""
    llama, entries = flags.out / "llama", []

    def add(name, kind, label, *arguments, before=(), prepare=None):
        if label in labels or label in PEERS or kind == "read":
            program = label if kind == "read" else FOLDER / (label if label in PEERS else "bin/" + file_of(label))
            dry = DRY.get(label, "").split() if flags.dry_run else []
            entries.append({"name": name, "kind": kind, "command": [*before, str(program), *arguments, *dry],
                            "peer": label in PEERS, "prepare": prepare or (lambda: None)})

    for label in [*FIRST_TESTS, *(label for label in labels if label not in FIRST_TESTS)]:
        if label.endswith("_test"):
            add(label[2:], "test", label)
    if SANITIZER:
        add("operators_test under compute-sanitizer", "test", OPERATORS_TEST,
            before=(SANITIZER, "--tool=memcheck", "--error-exitcode=9", "--print-limit=10"))
    add("llama: train", "train", TRAIN, f"--model={llama}", "--from_scratch", f"--data={FOLDER / 'run'}", "--ranks=1",
        "--seq=64", "--batch=4", "--steps=8", "--warmup=2", "--lr=1e-3", "--threads=1", "--device=cuda", "--metrics={written}",
        f"--export={llama / 'trained'}", prepare=functools.partial(write_tiny, llama))
    add("llama: generate", "generate", GENERATE, f"--model={llama / 'trained'}", "--prompt=def ", "--max_tokens=32",
        "--temperature=0", "--threads=1", "--device=cuda")
    written = ("--benchmark_out={written}", "--benchmark_out_format=json")
    for case in CASES:
        add(case, "benchmark", GPU_BENCHMARKS, *written, f"--benchmark_filter=^({case})/iterations")
    add("device_ops", "benchmark", DEVICE_OPS, *written, "--benchmark_filter=^cuda/")
    for name, (_, arguments) in PYTORCH.items():
        add(name, "peer", PEERS[0], "--device=cuda", "--threads=0", "--steps=10", "--warmup=3", *arguments.split(),
            before=(flags.python,))
    plan_llamas(add, flags)
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


def training_figures(lines, first_step_s):
    """Of the lines of JSON that a training writes, one for each step."""
    step_s = statistics.median(line["seconds"] for line in lines[WARMUP:] or lines)
    figures = {"last_loss": float(lines[-1]["loss"]), "tokens_per_s": lines[-1]["tokens"] / step_s, "step_ms": 1e3 * step_s,
               "first_step_s": first_step_s}
    if "tflops" in lines[-1]:
        figures["tflops"] = lines[-1]["tflops"] / lines[-1]["tokens_per_second"] * figures["tokens_per_s"]
    figures.update({f"loss_{number}": float(line["loss"]) for number, line in enumerate(lines[:3], 1)})
    return {**figures, **{key: value for key, value in lines[-1].items() if key.startswith("peak_")}}


def cases_of(entry, written, said, first_step_s):
    try:
        if entry["kind"] == "test":
            ended = re.findall(r"(?s)\[ RUN      \] (\S+)\n(.*?)(?:\[ +(OK|FAILED|SKIPPED) +\] \1\b|\Z)", said)
            return [case_of(name, {"OK": PASSED, "SKIPPED": SKIPPED}.get(mark, FAILED), message + ("" if mark else "has not ended"))
                    for name, message, mark in ended]
        if entry["kind"] == "benchmark":
            return list(benchmark_cases(written.read_text()))
        if entry["kind"] == "train":
            figures = training_figures(list(map(json.loads, written.read_text().splitlines())), first_step_s)
        elif entry["kind"] == "read":
            figures = {"first_step_s": first_step_s}
        elif entry["kind"] == "generate":
            figures = {"tokens_per_s": float(re.search(r"then: .* \((\S+) tokens/s\)", said)[1])}
        else:
            last = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
            figures = {key: value for key, value in last.items() if isinstance(value, (int, float))}
        return [case_of(entry["name"], PASSED if all(map(math.isfinite, figures.values())) else FAILED, str(figures), figures)]
    except (OSError, ValueError, LookupError, TypeError):
        return []  # Its exit code and output say why.


def wait(process, limit_s, written):
    """Until it ends. The seconds until it wrote something, or else ended. Raises subprocess.TimeoutExpired."""
    begin, first_s = time.monotonic(), None
    while process.poll() is None:
        now_s = time.monotonic() - begin
        if now_s > limit_s:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        if first_s is None and written.exists() and written.stat().st_size > 0:
            first_s = now_s
        time.sleep(0.01)
    return first_s or time.monotonic() - begin


def run_one(entry, limit_s, libraries):
    if entry["peer"]:  # Its torch finds its libraries itself.
        more = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    else:
        more = {"LD_LIBRARY_PATH": ":".join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")}
    entry["prepare"]()
    with tempfile.TemporaryDirectory(prefix="gpu_suite.") as scratch:
        written, output = pathlib.Path(scratch, "report.json"), pathlib.Path(scratch, "output")
        command = ["env", *(argument.replace("{written}", str(written)) for argument in entry["command"])]
        begin, outcome, first_step_s = time.monotonic(), None, math.nan
        with open(output, "wb") as file:  # `env` says itself what does not start.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=scratch,
                                       start_new_session=True, env={**os.environ, "TEST_TMPDIR": scratch, **more})
        try:
            first_step_s = wait(process, limit_s, written)
        except subprocess.TimeoutExpired:
            outcome = TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Also of all that it has started.
            process.wait()
        said = output.read_text(errors="replace")
        cases = cases_of(entry, written, said, first_step_s)
    not_here = NOT_HERE.get(SANITIZER if entry["command"][0] == SANITIZER else entry["kind"])
    if not_here and re.search(not_here, said):
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


def over(ours, theirs):
    return ours / theirs if ours and theirs else ""


def beside_transformers(figures):
    """The rows of the table; of its columns, the last five compare with the row "ours" of the group, or with its file."""
    for group, (_, rows) in BESIDE_TRANSFORMERS.items():
        of = {row: figures.get(f"Llama {group}: {row}", {}) for row in (*rows, AGAIN)}
        ours = of.get("ours", {})
        for row, found in of.items():
            if not found:
                continue
            tflops = found.get("tokens_per_s", 0) * ours.get("tflops", 0) / ours.get("tokens_per_s", math.inf)
            losses = [abs(found[key] / ours[key] - 1) for key in ("loss_1", "loss_2", "loss_3") if key in found and key in ours]
            file = of.get("its file, cold" if "cold" in row else "its file", {})
            yield (group, row, *(found.get(key, "") for key in ("step_ms", "tokens_per_s")), tflops or "",
                   *(found.get(key, "") for key in ("peak_allocated_mib", "peak_reserved_mib", "first_step_s")),
                   over(found.get("first_step_s"), file.get("first_step_s")), max(losses, default=""),
                   *(over(ours.get(key), found.get(key)) for key in ("tokens_per_s", "peak_allocated_mib")))


def bounds(figures):
    for group, row, key, relation, bound in BOUNDS:
        ours = [figures[name][key] for name in (f"Llama {group}: ours", f"Llama {group}: {AGAIN}") if key in figures.get(name, {})]
        worst = (min if relation == ">=" else max)(ours, default=None)
        measured = over(worst, figures.get(f"Llama {group}: {row}", {}).get(key))
        met = measured != "" and (measured >= bound if relation == ">=" else measured <= bound)
        yield group, f"{key} over {row}", f"{relation} {bound}", measured, \
            "not run" if measured == "" else "met" if met else "not met"


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
                                              *beside_pytorch(figures))]
    lines += ["## Llama beside transformers", "", *table(
        ("model", "", "step, ms", "tokens/s", "TFLOPS", "allocated, MiB", "reserved, MiB", "first step, s",
         "first step over reading", "losses differ by", "ours over its tokens/s", "ours over its memory"),
        *beside_transformers(figures)), *table(("model", "ours", "bound", "measured", ""), *bounds(figures))]
    lines += ["## All figures", ""]
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
        entries = [entry for entry in entries if with_torch or not entry["peer"]]
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
        result = run_one(entry, min(limit_s, left_s), libraries)
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
