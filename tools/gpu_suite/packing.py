"""What goes into the folder of GPU tests and benchmarks. tools/gpu_suite/pack is the command."""
import json
import pathlib
import re
import shutil
import subprocess

LIMIT_BYTES = 60 << 20
TEST_LIMIT_S, BENCHMARK_LIMIT_S = 600, 1200
# A benchmark that also runs on a GPU, and the flags of that part.
ALSO = "//benchmarks:device_ops_benchmark"
ALSO_FLAGS = ["--benchmark_filter=^cuda/"]
# What tells most comes first: a machine may be lent for minutes.
FIRST = ("smoke_test", "gpu_train_step")
QUERY = rf'attr(tags, "\bgpu\b", kind("cc_(test|binary) rule", //...)) + {ALSO}'
SCRIPTS = ("driver.py", "libtorch.py", "report.py")
# PyTorch's own, to be run with the model of //benchmarks:gpu_train_step by a Python that has torch.
PEER_PROGRAM = "peer_gpt.py"
PEER_MODEL = ["--device=cuda", "--layers=20", "--dim=2048", "--heads=16", "--seq=1024", "--batch=4", "--vocab=8192",
              "--steps=20", "--warmup=3"]
# One rank of FSDP1 shards nothing (NO_SHARD).
PEERS = {"none": "plain PyTorch", "fsdp1": "PyTorch FSDP1 (not sharded)", "fsdp2": "PyTorch FSDP2"}
# What a machine with LibTorch for CUDA has: the system's libraries, LibTorch's, and those that come with it.
PROVIDED = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|c10|c10_cuda|torch|torch_cpu|torch_cuda|cudart|cupti"
                      r"|nccl)|ld-linux-.*)\.so(\.\d+)*")


class PackError(Exception):
    """Why there is no folder."""


def program_of(label, kind):
    """What the manifest says of a target."""
    package, name = label[2:].split(":")
    is_test = kind == "cc_test"
    return {"name": f"{package}:{name}", "file": f"{package.replace('/', '.')}.{name}",
            "kind": "test" if is_test else "benchmark", "takes_device": name.startswith("gpu_"),
            "flags": ALSO_FLAGS if label == ALSO else [],
            "limit_s": TEST_LIMIT_S if is_test else BENCHMARK_LIMIT_S}


def peers():
    """What the manifest says of PyTorch's implementations."""
    return [{"name": f"{title}, {dtype}", "file": PEER_PROGRAM, "kind": "peer", "takes_device": False,
             "limit_s": BENCHMARK_LIMIT_S, "flags": [f"--impl={key}", *PEER_MODEL, *flags]}
            for dtype, flags in (("bf16", ["--pure-bf16"]), ("fp32", [])) for key, title in PEERS.items()]


def programs_of(listing):
    """Of `bazel query --output=label_kind`: {label: program}, tests first."""
    found = {}
    for line in listing.splitlines():
        match = re.fullmatch(r"(cc_test|cc_binary) rule (//\S+:\S+)", line.strip())
        if match:
            found[match.group(2)] = program_of(match.group(2), match.group(1))
    return dict(sorted(found.items(), key=lambda item: (
        item[1]["kind"] != "test", not item[0].endswith(FIRST), item[0])))


def foreign_libraries(dynamic_section):
    """Of what `readelf -d` prints, the needed libraries that the other machine would lack."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic_section)
    return [name for name in needed if not PROVIDED.fullmatch(name)]


def output_of(command, **options):
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True,
                              **options).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise PackError(f"'{' '.join(map(str, command))[:200]}' failed: {error}") from error


def pack_program(source, target):
    """A stripped copy."""
    shutil.copyfile(source, target)
    target.chmod(0o755)
    output_of(["strip", "--strip-all", str(target)])
    foreign = foreign_libraries(output_of(["readelf", "-dW", str(target)]))
    if foreign:
        raise PackError(f"{source} needs {', '.join(foreign)}, which a machine with LibTorch for CUDA may lack")


def fill(out, programs, binaries, sources, build):
    """Makes `out`, which is empty or not there, from `binaries`: {label: file}."""
    here = pathlib.Path(__file__).resolve().parent
    (out / "bin").mkdir(parents=True)
    for label, program in programs.items():
        pack_program(binaries[label], out / "bin" / program["file"])
    shutil.copyfile(here.parent.parent / "benchmarks" / "peers" / PEER_PROGRAM, out / PEER_PROGRAM)
    for name in SCRIPTS:
        shutil.copyfile(here / name, out / name)
    shutil.copyfile(here / "run.py", out / "run")
    (out / "run").chmod(0o755)
    manifest = {"sources": sources, "build": build, "programs": [*programs.values(), *peers()]}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if size > LIMIT_BYTES:
        raise PackError(f"{out} has {size / 2**20:.1f} MiB, more than {LIMIT_BYTES >> 20}; leave programs out: --only")
    return size
