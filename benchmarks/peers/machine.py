"""What figures depend on: the machine and how our programs are compiled."""
import datetime
import os
import platform
import re

import python_torch


def cpu_model(cpuinfo):
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return " ".join(match.group(1).split()) if match else platform.machine()


def compiler(program):
    """As the compiler has noted it in a program; "" where it has not."""
    try:
        with open(program, "rb") as file:
            match = re.search(rb"GCC: \([^)\0]*\) [\d.]+|clang version [\d.]+", file.read())
    except OSError:
        return ""
    return re.sub(r"GCC: \(.*\)", "g++", match.group().decode()) if match else ""


def read_file(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def describe(program, mode, cores):
    """`cores`: those that are used."""
    total = re.search(r"MemTotal:\s*(\d+) kB", read_file("/proc/meminfo"))
    return {
        "cpu": cpu_model(read_file("/proc/cpuinfo")),
        "cores": os.cpu_count(),
        "cores_used": len(cores),
        "memory_gib": round(int(total.group(1)) / 2**20) if total else 0,
        "kernel": platform.release().split("-")[0],
        "compiler": compiler(program),
        "mode": mode and f"-c {mode.replace(',', ' ')}",
        "libtorch": python_torch.VERSION,
        "date": datetime.date.today().isoformat(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def sentence(machine):
    parts = [
        machine["cpu"],
        f"{machine['cores_used']} of {machine['cores']} cores",
        f"{machine['memory_gib']} GiB",
        f"Linux {machine['kernel']}",
        f"{machine['compiler']} {machine['mode']}".strip(),
        f"LibTorch {machine['libtorch']}",
    ]
    return f"{', '.join(part for part in parts if part)}; {machine['date']}"
