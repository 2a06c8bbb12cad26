"""What goes into the folder of GPU tests and benchmarks. tools/gpu_suite/pack is the command."""
import json
import pathlib
import re
import shutil
import subprocess

import plan

LIMIT_BYTES = 40 << 20
QUERY = rf'attr(tags, "\bgpu\b", kind("cc_(test|binary) rule", //...)) + {plan.DEVICE_OPS}'
SCRIPTS = ("driver.py", "execute.py", "libtorch.py", "markdown.py", "report.py", "targets.py")
# PyTorch's side, to be run by a Python that has torch.
PEER_SCRIPTS = (plan.PEER_PROGRAM, "peer_flags.py")
# What a machine with LibTorch for CUDA has: the system's libraries, LibTorch's, and those that come with it.
PROVIDED = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|c10|c10_cuda|torch|torch_cpu|torch_cuda|cudart|cupti"
                      r"|nccl)|ld-linux-.*)\.so(\.\d+)*")


class PackError(Exception):
    """Why there is no folder."""


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
    output_of(["strip", "--strip-all", "--remove-section=.comment", str(target)])
    foreign = foreign_libraries(output_of(["readelf", "-dW", str(target)]))
    if foreign:
        raise PackError(f"{source} needs {', '.join(foreign)}, which a machine with LibTorch for CUDA may lack")


def sizes_of(folder):
    """[(bytes, path)], the largest first."""
    return sorted(((path.stat().st_size, path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
                  reverse=True)


def fill(out, binaries, programs, sources, build):
    """Makes `out`, which is empty or not there, from `binaries`, {name in the folder: file}, and the entries of the
    manifest. Returns its bytes."""
    here = pathlib.Path(__file__).resolve().parent
    (out / "bin").mkdir(parents=True)
    for name, file in binaries.items():
        pack_program(file, out / "bin" / name)
    for name in PEER_SCRIPTS:
        shutil.copyfile(here.parent.parent / "benchmarks" / "peers" / name, out / name)
    for name in SCRIPTS:
        shutil.copyfile(here / name, out / name)
    shutil.copyfile(here / "run.py", out / "run")
    (out / "run").chmod(0o755)
    manifest = {"sources": sources, "build": build, "programs": programs}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sizes = sizes_of(out)
    total = sum(size for size, _ in sizes)
    if total > LIMIT_BYTES:
        largest = ", ".join(f"{path} {size / 2**20:.1f}" for size, path in sizes[:4])
        raise PackError(f"{out} has {total / 2**20:.1f} MiB, more than {LIMIT_BYTES >> 20} (the largest: {largest}); leave "
                        "programs out by --only, or architectures by --archs")
    return total
