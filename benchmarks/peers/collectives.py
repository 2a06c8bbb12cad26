"""Collectives of //benchmarks:collectives_benchmark beside those of Gloo from Python."""
import csv
import io
import json
import re
import statistics
import typing

import contenders
import processes
import summary
import tables

PYTHON_GLOO = "Gloo from Python"
LATENCY_BYTES = 64 << 10
BANDWIDTH_BYTES = (16 << 20, 128 << 20)
NANOSECONDS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}
_OPERATION = re.compile(r"all_?gather|reduce_?scatter|all_?reduce|broadcast")
_IGNORED = {"real_time", "process_time", "manual_time"}


class Key(typing.NamedTuple):
    operation: str  # "all-gather"; with what else its name says: "all-gather, cast"
    backend: str
    size: int  # bytes of the whole tensor


class Timing(typing.NamedTuple):
    seconds: float
    of_memcpy: typing.Optional[float]


def parse_name(name):
    """(Key, ranks or None) of BM_Collective/local_all_gather/bytes:65536/ranks:2/real_time, AllGather/local/65536 and
    the like: what stands before the operation, or else behind it, is the backend. None for other names."""
    words, numbers, named = [], [], {}
    for part in name.split("/"):
        label, colon, value = part.partition(":")
        if colon:
            named[label] = value
        elif part.isdigit():
            numbers.append(int(part))
        elif part not in _IGNORED and not part.startswith("BM_"):
            words.append(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).replace("-", "_").lower())
    match = _OPERATION.search("_".join(words))
    size = int(named["bytes"]) if "bytes" in named else numbers.pop(0) if numbers else None
    if not match or size is None:
        return None
    text = "_".join(words)
    before, after = text[:match.start()].strip("_"), text[match.end():].strip("_")
    backend, variant = (before, after) if before else (after, "")
    operation = re.sub(r"(all|reduce)_?(gather|scatter|reduce)", r"\1-\2", match.group())
    if variant:
        operation += ", " + variant.replace("_", " ")
    ranks = int(named["ranks"]) if "ranks" in named else numbers.pop(0) if numbers else None
    return Key(operation, backend.replace("_", " "), size), ranks


def parse_benchmark(text):
    """{Key: Timing} of Google Benchmark's JSON, for contenders.RANKS ranks; of repetitions the median."""
    try:
        entries = json.loads(text)["benchmarks"]
        found = {}
        for entry in entries:
            if entry.get("error_occurred"):
                raise processes.RunError(f"{entry['name']}: {entry.get('error_message', 'failed')}")
            parsed = parse_name(entry.get("run_name", entry["name"]))
            if parsed and parsed[1] in (None, contenders.RANKS) and entry.get("run_type", "iteration") == "iteration":
                seconds = entry["real_time"] * NANOSECONDS[entry["time_unit"]] / 1e9
                found.setdefault(parsed[0], []).append(Timing(seconds, entry.get("of_memcpy")))
    except (KeyError, TypeError, ValueError) as error:
        raise processes.RunError(f"expected Google Benchmark's JSON, found {text[:200]!r} "
                                 f"({type(error).__name__}: {error})") from error
    return {key: _median(timings) for key, timings in found.items()}


def parse_peer(text):
    """{Key: Timing} of the lines that peer_collectives.py prints."""
    found = {}
    try:
        for entry in [json.loads(line) for line in text.splitlines() if line.startswith("{")]:
            key = Key(entry["op"].replace("_", "-"), PYTHON_GLOO, entry["bytes"])
            found[key] = Timing(entry["ms"] / 1e3, None)
    except (KeyError, TypeError, ValueError) as error:
        raise processes.RunError(f"peer_collectives.py printed something else than its lines of JSON: {text[-200:]!r} "
                                 f"({type(error).__name__}: {error})") from error
    return found


def _median(timings):
    shares = [timing.of_memcpy for timing in timings if timing.of_memcpy is not None]
    seconds = statistics.median(timing.seconds for timing in timings)
    return Timing(seconds, statistics.median(shares) if shares else None)


def benchmark_command(program, quick):
    return processes.Command("collectives_benchmark", [
        str(program), "--benchmark_format=json", f"--benchmark_filter=-ranks:[^{contenders.RANKS}]",
        f"--benchmark_min_time={0.01 if quick else 0.2}"], {"OMP_NUM_THREADS": "1"})


def peer_commands(python):
    sizes = ",".join(map(str, (LATENCY_BYTES, *BANDWIDTH_BYTES)))
    return contenders.rank_commands("peer_collectives.py", [
        python, str(contenders.FOLDER / "peer_collectives.py"), f"--bytes={sizes}"], contenders.RANKS)


def gloo_of(rounds):
    """The backend that others are compared with: Python's, else ours over Gloo; None without either."""
    backends = {key.backend for timings in rounds for key in timings}
    return next((name for name in (PYTHON_GLOO, "gloo") if name in backends), None)


def table(rounds):
    """Rows for tables.markdown(). `rounds`: {Key: Timing} of each round."""
    gloo = gloo_of(rounds)
    head = [f"{contenders.RANKS} ranks", "64 KiB, us", "times faster"]
    for size in BANDWIDTH_BYTES:
        head += [f"{size >> 20} MiB, GB/s", "of memcpy", "times faster"]
    rows = [head]
    for operation, backend in _lines(rounds):
        row = [f"{operation}: {backend}"]
        for size in (LATENCY_BYTES, *BANDWIDTH_BYTES):
            key = Key(operation, backend, size)
            timings = [timings[key] for timings in rounds if key in timings]
            row += _cells(size, timings, None if backend == gloo else _speedups(rounds, key, gloo))
        rows.append(row)
    return rows


def _lines(rounds):
    """(operation, backend) in the order in which they were measured, operation by operation."""
    seen = list(dict.fromkeys((key.operation, key.backend) for timings in rounds for key in timings))
    operations = list(dict.fromkeys(operation for operation, _ in seen))
    return sorted(seen, key=lambda line: operations.index(line[0]))


def _speedups(rounds, key, gloo):
    """How much longer Gloo takes, by round. A variant of an operation is compared with the operation itself."""
    plain = Key(key.operation.split(",")[0], gloo, key.size)
    return summary.summarize(timings[plain].seconds / timings[key].seconds for timings in rounds
                             if plain in timings and key in timings)


def _cells(size, timings, speedup):
    faster = tables.with_spread(speedup, "{:.1f}".format)
    if size == LATENCY_BYTES:
        micros = summary.summarize(timing.seconds * 1e6 for timing in timings)
        return ["" if micros is None else tables.milliseconds(micros.median), faster]
    rate = summary.summarize(size / timing.seconds / 1e9 for timing in timings)
    share = summary.summarize(timing.of_memcpy for timing in timings if timing.of_memcpy is not None)
    return ["" if rate is None else f"{rate.median:.2f}", "" if share is None else f"{share.median:.2f}", faster]


def _entries(rounds):
    for number, timings in enumerate(rounds, start=1):
        for key, timing in timings.items():
            yield {"round": number, "operation": key.operation, "backend": key.backend, "bytes": key.size,
                   "seconds": timing.seconds, "of_memcpy": timing.of_memcpy}


def as_json(rounds):
    return list(_entries(rounds))


def as_csv(rounds):
    out = io.StringIO()
    columns = ["round", "operation", "backend", "bytes", "seconds", "of_memcpy"]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_entries(rounds))
    return out.getvalue()
