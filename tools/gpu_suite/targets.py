"""What has to hold, and who is compared with whom. Cases are those of benchmarks and peers, by name."""
import dataclasses
import typing

HELD, MISSED, NOT_MEASURED = "yes", "**no**", "not measured"


@dataclasses.dataclass(frozen=True)
class Target:
    number: int  # several may belong together
    text: str
    figure: typing.Tuple[str, str]  # case, figure
    least: typing.Optional[float] = None
    most: typing.Optional[float] = None
    over: typing.Optional[typing.Tuple[str, str]] = None  # what it is divided by


TARGETS = (
    Target(1, "GPT of 1B in bf16: step over plain LibTorch's", ("train_step/bf16", "of_plain"), most=1.01),
    Target(1, "GPT of 1B in bf16: tokens/s over FSDP2's", ("train_step/bf16", "tokens_per_s"), least=1.05,
           over=("FSDP2, bf16", "tok_s")),
    Target(2, "GPT of 1B in fp32: step over plain LibTorch's", ("train_step/fp32", "of_plain"), most=1.01),
    Target(3, "bf16 over fp32 shards: tokens/s over FSDP2's", ("sharded_step/bf16_over_fp32", "tokens_per_s"), least=1,
           over=("FSDP2, bf16 over fp32", "tok_s")),
    Target(4, "bf16: peak memory over FSDP2's", ("train_step/bf16", "peak_MB"), most=1,
           over=("FSDP2, bf16", "peak_device_mb")),
    Target(4, "bf16 over fp32 shards: peak memory over FSDP2's", ("sharded_step/bf16_over_fp32", "peak_MB"), most=1,
           over=("FSDP2, bf16 over fp32", "peak_device_mb")),
    Target(4, "bf16: memory between steps over the plan's", ("train_step/bf16", "reserved_of_plan"), 0.98, 1.02),
    Target(5, "50 small blocks: microseconds of the host added per unit", ("host_cost", "added_us_per_unit"), most=30),
    Target(5, "50 small blocks: FSDP2's step over ours", ("FSDP2, 50 small blocks", "step_ms"), least=3,
           over=("host_cost", "ms")),
    Target(6, "8 played ranks: buffers in use over the plan's", ("train_step/bf16/8_ranks", "of_plan"), 0.98, 1.02),
    Target(6, "8 played ranks: memory between steps over the plan's", ("train_step/bf16/8_ranks", "reserved_of_plan"),
           0.98, 1.02),
    Target(7, "packing bf16: bytes/s over a copy's", ("cuda/pack/bf16_to_bf16", "bytes_per_second"), least=0.9,
           over=("cuda/copy", "bytes_per_second")),
    Target(7, "packing bf16 into fp32: bytes/s over torch's _chunk_cat", ("cuda/pack/bf16_to_float", "bytes_per_second"),
           least=1, over=("cuda/chunk_cat/bf16_to_float", "bytes_per_second")),
    Target(8, "FusedAdamW over flat fp32 shards: bytes/s over a copy's", ("fused_adamw/fp32", "of_copy"), least=0.9),
    Target(8, "FusedAdamW over flat bf16 shards: bytes/s over a copy's", ("fused_adamw/bf16", "of_copy"), least=0.9),
    Target(9, "all in host memory, bf16: of the resident step's speed", ("offload/stepped_on_device/bf16", "of_resident"),
           least=0.42),
    Target(9, "all in host memory, fp32: of the resident step's speed", ("offload/stepped_on_host/fp32", "of_resident"),
           least=0.42),
    Target(9, "all in host memory: tokens/s over FSDP2's with CPUOffloadPolicy",
           ("sharded_step/bf16_over_fp32/all_on_host", "tokens_per_s"), least=1.5,
           over=("FSDP2, bf16 over fp32, CPUOffloadPolicy", "tok_s")),
    Target(10, "full fine-tune of 7B, states in host memory: TFLOPS", ("full_finetune/states_on_host", "TFLOPS"),
           least=272),
    Target(10, "full fine-tune of 7B: the last loss over the first", ("full_finetune/states_on_host", "last_loss"),
           most=1, over=("full_finetune/states_on_host", "first_loss")),
    Target(10, "full fine-tune of 7B, all in host memory: TFLOPS", ("full_finetune/all_on_host", "TFLOPS"), least=272),
)

# Where a contender's milliseconds, tokens/s and peak are.
_OURS = ("ms", "tokens_per_s", "peak_MB")
_PLAIN = ("plain_ms", None, "plain_peak_MB")
_PEER = ("step_ms", "tok_s", "peak_device_mb")
# (title, ((contender, case, figures), ...)), the first of which the others are compared with.
COMPARISONS = (
    ("GPT of 1B, bf16", (
        ("ours", "train_step/bf16", _OURS), ("plain LibTorch", "train_step/bf16", _PLAIN),
        ("plain PyTorch", "PyTorch, bf16", _PEER), ("PyTorch FSDP2", "FSDP2, bf16", _PEER),
        ("PyTorch FSDP1 (not sharded)", "FSDP1, bf16", _PEER))),
    ("GPT of 1B, bf16 over fp32 shards", (
        ("ours", "sharded_step/bf16_over_fp32", _OURS), ("PyTorch FSDP2", "FSDP2, bf16 over fp32", _PEER))),
    ("GPT of 1B, bf16 over fp32 shards, all in host memory", (
        ("ours", "sharded_step/bf16_over_fp32/all_on_host", _OURS),
        ("PyTorch FSDP2, CPUOffloadPolicy", "FSDP2, bf16 over fp32, CPUOffloadPolicy", _PEER))),
    ("GPT of 1B, fp32", (
        ("ours", "train_step/fp32", _OURS), ("plain LibTorch", "train_step/fp32", _PLAIN),
        ("plain PyTorch", "PyTorch, fp32", _PEER), ("PyTorch FSDP2", "FSDP2, fp32", _PEER))),
    ("50 small blocks", (
        ("ours", "host_cost", _OURS), ("plain LibTorch", "host_cost", _PLAIN),
        ("plain PyTorch", "PyTorch, 50 small blocks", _PEER), ("PyTorch FSDP2", "FSDP2, 50 small blocks", _PEER))),
    ("full fine-tune of 7B", (
        ("ours, states in host memory", "full_finetune/states_on_host", _OURS),
        ("ours, all in host memory", "full_finetune/all_on_host", _OURS),
        ("PyTorch FSDP2, CPUOffloadPolicy", "FSDP2, 7B, CPUOffloadPolicy", _PEER))),
)


def figures_of(results):
    """{case: {figure: number}} of all benchmarks and peers."""
    return {case["name"]: case["figures"] for program in results["programs"] if program["kind"] in ("benchmark", "peer")
            for case in program["cases"]}


def bounds_of(target):
    return " and ".join(([f">= {target.least:g}"] if target.least is not None else [])
                        + ([f"<= {target.most:g}"] if target.most is not None else []))


def check(results):
    """[(target, value or None, HELD, MISSED or NOT_MEASURED)] of all TARGETS."""
    figures = figures_of(results)

    def look_up(where):
        return figures.get(where[0], {}).get(where[1])

    found = []
    for target in TARGETS:
        value = look_up(target.figure)
        if value is not None and target.over is not None:
            under = look_up(target.over)
            value = value / under if under else None
        if value is None:
            found.append((target, None, NOT_MEASURED))
            continue
        holds = (target.least is None or value >= target.least) and (target.most is None or value <= target.most)
        found.append((target, value, HELD if holds else MISSED))
    return found


def compare(results):
    """[(title, [(contender, ms, tokens/s, peak MB, ms over the first's)])]; None for what was not measured. Without
    comparisons of which nothing was."""
    figures = figures_of(results)
    found = []
    for title, contenders in COMPARISONS:
        rows = [(name, *(figures.get(case, {}).get(key) for key in keys)) for name, case, keys in contenders]
        if any(row[1] is not None for row in rows):
            first = rows[0][1]
            found.append((title, [(*row, row[1] / first if first and row[1] is not None else None) for row in rows]))
    return found
