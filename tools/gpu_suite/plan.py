"""What runs where a GPU is, what tells most first: a machine may be lent for minutes."""
import re

TEST_LIMIT_S, BENCHMARK_LIMIT_S, PEER_LIMIT_S = 90, 120, 90
BENCHMARKS, DEVICE_OPS = "//benchmarks:gpu_benchmarks", "//benchmarks:device_ops_benchmark"
OPERATORS_TEST = "//device_ops/cuda:operators_test"
SANITIZED = "operators_test under compute-sanitizer"
PEER_PROGRAM = "peer_gpt.py"

# What a dry run adds: on the fake device, and small. Flags that come later win.
DRY_BENCHMARK = ["--device=privateuseone", "--turns=2", "--layers=3", "--dim=8", "--heads=2", "--seq=8", "--batch=2",
                 "--vocab=16", "--large_layers=3", "--large_dim=8", "--large_heads=2", "--large_batch=2", "--units=2",
                 "--matrix=8", "--rows=4", "--largest_mib=1"]
DRY_DEVICE_OPS = ["--benchmark_filter=^cpu/copy", "--benchmark_min_time=0.001"]
DRY_PEER = ["--device=cpu", "--layers=2", "--dim=16", "--heads=2", "--seq=8", "--batch=2", "--vocab=16", "--steps=2",
            "--warmup=1", "--threads=1"]

# The models of //benchmarks:gpu_benchmarks.
_BILLION = ["--layers=20", "--dim=2048", "--heads=16", "--seq=1024", "--batch=4", "--vocab=8192"]
_SMALL_BLOCKS = ["--layers=50", "--dim=64", "--heads=4", "--seq=16", "--batch=1", "--vocab=64"]
_SEVEN_BILLION = ["--layers=34", "--dim=4096", "--heads=32", "--seq=1024", "--batch=16", "--vocab=8192",
                  "--micro-batches=2", "--recompute", "--clip=1", "--steps=2", "--warmup=1"]


def file_of(label):
    """Its program's name in the folder."""
    return label[2:].replace("/", ".").replace(":", ".")


def _entry(name, kind, label_or_file, limit_s, flags=(), dry_flags=()):
    file = file_of(label_or_file) if label_or_file.startswith("//") else label_or_file
    return {"name": name, "kind": kind, "file": file, "limit_s": limit_s, "flags": list(flags),
            "dry_flags": list(dry_flags), "takes_flags": label_or_file == BENCHMARKS}


def _test(label):
    return _entry(label[2:], "test", label, TEST_LIMIT_S)


def _benchmark(name, *cases, limit_s=BENCHMARK_LIMIT_S):
    """`cases`: regular expressions of whole names; `name` itself without any."""
    return _entry(name, "benchmark", BENCHMARKS, limit_s,
                  [f"--benchmark_filter=^({'|'.join(cases or (name,))})/iterations"], DRY_BENCHMARK)


def _peer(name, impl, model, *flags, limit_s=PEER_LIMIT_S):
    return _entry(name, "peer", PEER_PROGRAM, limit_s,
                  [f"--impl={impl}", "--device=cuda", "--threads=0", "--steps=10", "--warmup=3", *model, *flags],
                  DRY_PEER)


def _plan(other_tests):
    yield _test("//third_party/cuda:smoke_test")
    yield _test(OPERATORS_TEST)
    yield _test("//fsdp/tests/device:cuda_training_test")
    yield _benchmark("train_step/bf16")
    yield _peer("PyTorch, bf16", "none", _BILLION, "--pure-bf16")
    yield _peer("FSDP2, bf16", "fsdp2", _BILLION, "--pure-bf16")
    yield _peer("FSDP1, bf16", "fsdp1", _BILLION, "--pure-bf16")
    yield from map(_test, other_tests)
    yield _entry(SANITIZED, "sanitizer", OPERATORS_TEST, TEST_LIMIT_S)
    yield _benchmark("sharded_step/bf16_over_fp32")
    yield _peer("FSDP2, bf16 over fp32", "fsdp2", _BILLION, "--bf16")
    yield _benchmark("host_cost")
    yield _peer("PyTorch, 50 small blocks", "none", _SMALL_BLOCKS)
    yield _peer("FSDP2, 50 small blocks", "fsdp2", _SMALL_BLOCKS)
    yield _benchmark("captured steps", "host_cost/captured", "train_step/bf16/captured")
    yield _benchmark("fused_adamw", "fused_adamw/.*")
    yield _entry("device_ops", "benchmark", DEVICE_OPS, BENCHMARK_LIMIT_S, ["--benchmark_filter=^cuda/"], DRY_DEVICE_OPS)
    yield _benchmark("full_finetune/states_on_host", limit_s=240)
    yield _benchmark("sharded_step/bf16_over_fp32/all_on_host")
    yield _peer("FSDP2, bf16 over fp32, CPUOffloadPolicy", "fsdp2", _BILLION, "--bf16", "--cpu-offload", "--steps=4",
                "--warmup=1")
    yield _benchmark("offload", "offload/.*", limit_s=150)
    yield _benchmark("train_step/fp32")
    yield _peer("PyTorch, fp32", "none", _BILLION)
    yield _peer("FSDP2, fp32", "fsdp2", _BILLION)
    yield _benchmark("train_step/bf16/8_ranks")
    yield _benchmark("collectives", "(all_gather|reduce_scatter)/.*")
    yield _benchmark("train_step/checkpointing", "train_step/(bf16|fp32)/checkpointing")
    yield _peer("FSDP2, 7B, CPUOffloadPolicy", "fsdp2", _SEVEN_BILLION, "--bf16", "--cpu-offload", limit_s=180)
    yield _benchmark("full_finetune/all_on_host", limit_s=240)


def labels_of(listing):
    """Of `bazel query --output=label_kind`: {label: "cc_test" or "cc_binary"}."""
    found = {}
    for line in listing.splitlines():
        match = re.fullmatch(r"(cc_test|cc_binary) rule (//\S+:\S+)", line.strip())
        if match:
            found[match.group(2)] = match.group(1)
    return found


def programs(labels):
    """The manifest's entries for these programs, {label: kind}, and PyTorch's. None of `labels` is left out."""
    planned = {entry["file"] for entry in _plan(())}
    others = sorted(label for label, kind in labels.items() if kind == "cc_test" and file_of(label) not in planned)
    files = {file_of(label) for label in labels} | {PEER_PROGRAM}
    entries = [entry for entry in _plan(others) if entry["file"] in files]
    unplanned = sorted(files - {entry["file"] for entry in entries})
    return entries + [_entry(file, "benchmark", file, BENCHMARK_LIMIT_S) for file in unplanned]
