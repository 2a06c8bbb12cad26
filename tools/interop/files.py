"""The files of our checkpoints and of Hugging Face's models: tensors, each when it is needed, and the manifest."""
import contextlib
import ctypes
import io
import json
import math
import mmap
import os
import pathlib
import shutil

try:
    import torch
except ImportError:
    torch = None  # --help works without

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2"}
FORMATS = {"torch." + name: key for key, name in DTYPES.items()}
MIB = 1 << 20


class Refused(Exception):
    """What the user has to know."""


@contextlib.contextmanager
def naming(path):
    """Errors inside say which file they are about."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # whatever a damaged file makes torch, json or the system say
        raise Refused(f"{path}: {(str(error).splitlines() or [''])[0] or type(error).__name__}") from error


@contextlib.contextmanager
def new_folder(path):
    """A folder to write to, which gets its name when it is whole."""
    path = pathlib.Path(path)
    work = path.with_name(path.name + ".incomplete")
    if os.path.lexists(path):
        raise Refused(f"{path} is there already and is not written over: name another one, or move that one away")
    with naming(work):
        work.mkdir()
    try:
        yield work
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


# --- Checksums --------------------------------------------------------------


class Crc32c:
    """Many at a time. zeros[k]: what 2^k bytes of zeros make of a sum."""

    def __init__(self):
        def byte(sums):
            for _ in range(8):
                sums = sums >> 1 ^ (sums & 1) * 0x82F63B78
            return sums
        self.zeros = [(byte(torch.arange(1 << 16)), byte(torch.arange(1 << 16) << 16))]
        for power in range(20):
            self.zeros.append(tuple(self.behind(half, power) for half in self.zeros[power]))

    def behind(self, sums, power):
        low, high = self.zeros[power]
        return low.index_select(0, sums.reshape(-1) & 0xFFFF).view_as(sums) ^ high.index_select(
            0, sums.reshape(-1) >> 16).view_as(sums)

    def over(self, total, count):
        """`total` behind `count` bytes of zeros, 1 MiB at most."""
        for power in range(21):
            total = self.behind(total, power) if count >> power & 1 else total
        return total

    def blocks(self, data):
        """(sum, bytes) of each MiB of a bytearray; the last one may be shorter."""
        sizes = [min(MIB, len(data) - begin) for begin in range(0, len(data), MIB)]
        begin = len(data) - sizes[-1]
        data[begin:begin] = bytes(MIB - sizes[-1])  # zeros in front change nothing
        words = torch.frombuffer(data, dtype=torch.int16).view(-1, 256).t().contiguous()
        sums = torch.zeros(words.shape[1], dtype=torch.int64)
        for word in words:
            sums = self.behind(sums ^ word.long() & 0xFFFF, 1)
        for power in range(9, 20):
            sums = self.behind(sums[0::2], power) ^ sums[1::2]
        ones = torch.tensor(0xFFFFFFFF)
        return [(one ^ ones ^ self.over(ones, size), size) for one, size in zip(sums, sizes)]

    def entry(self, file):
        """What a manifest says of it."""
        count, total, blocks = 0, torch.tensor(0), ""
        while data := bytearray(file.read(4 * MIB)):
            for one, size in self.blocks(data):
                count += size
                total = self.over(total, size) ^ one
                blocks += f"{int(one):08x}"
        return {"bytes": count, "crc32c": f"{int(total):08x}", "blocks": blocks}


def entry_of(crc, path):
    with naming(path), open(path, "rb") as file:
        return crc.entry(file)


def write_manifest(folder, step):
    """Of all files of a checkpoint's folder, which it makes whole."""
    crc = Crc32c()
    files = {str(path.relative_to(folder)): entry_of(crc, path) for path in sorted(folder.rglob("*")) if path.is_file()}
    text = json.dumps({"format": "libtorch_fsdp checkpoint", "version": 1, "step": step, "block_bytes": MIB,
                       "files": files})[:-1].encode()
    write_file(folder / "manifest.json", [text, f', "crc32c": "{crc.entry(io.BytesIO(text))["crc32c"]}"}}\n'.encode()])


def checked_files(folder):
    """The paths of a checkpoint's files, which are as its manifest says."""
    crc = Crc32c()
    with naming(folder / "manifest.json"):
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
    for name, entry in files.items():
        if entry_of(crc, folder / name) != entry:
            raise Refused(f"{folder / name} is damaged: take another checkpoint; tools/checkpoint verify says more")
    return [folder / name for name in files]


# --- Tensors ----------------------------------------------------------------


def torch_dtype(dtype):
    return getattr(torch, DTYPES[dtype])


def bytes_of(tensor):
    """The memory of a contiguous tensor, which has to outlive it."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B") if tensor.nbytes else b""


def write_file(path, chunks):
    """A new file, synced."""
    with naming(path), open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def write_tensors(folder, stem, infos, read, limit=5_000_000_000):
    """As Hugging Face lays a model out. infos: (dtype, shape) by name; read(name): the tensor."""
    item = {name: torch_dtype(dtype).itemsize for name, (dtype, _) in infos.items()}
    size_of = {name: math.prod(shape) * item[name] for name, (_, shape) in infos.items()}
    files, used = [[]], 0
    for name, size in size_of.items():
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size

    def chunks(names):
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            header[name] = {"dtype": infos[name][0], "shape": list(infos[name][1]),
                            "data_offsets": [end, end := end + size_of[name]]}
        text = json.dumps(header, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            tensor = read(name).contiguous()
            yield bytes_of(tensor)

    where = {}
    for number, names in enumerate(files, 1):
        names.sort(key=lambda name: -item[name])  # so that all are aligned
        path = folder / (stem + (f"-{number:05}-of-{len(files):05}" if len(files) > 1 else "") + ".safetensors")
        path.parent.mkdir(exist_ok=True)
        write_file(path, chunks(names))
        where.update(dict.fromkeys(names, path.name))
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(size_of.values())}, "weight_map": where}
        write_file(folder / f"{stem}.safetensors.index.json", [json.dumps(index, indent=2).encode()])


class Safetensors:
    """The tensors of files."""

    def __init__(self, paths):
        self.infos, self.places, self.maps = {}, {}, {}  # by name, (dtype, shape) and (path, begin); by path
        for path in paths:
            with naming(path), open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, os.path.getsize(path))))
                if "DCP_SHARDING_INFO" in header.pop("__metadata__", {}):
                    raise Refused(f"{path} has pieces of ranks: load it and save it with SaveLayout::kShared")
                for name, entry in header.items():
                    if name in self.infos or entry["dtype"] not in DTYPES:
                        raise Refused(f"{path}: {name} is there twice, or of {entry['dtype']}, which torch lacks")
                    self.infos[name] = (entry["dtype"], entry["shape"])
                    self.places[name] = (path, 8 + size + entry["data_offsets"][0])

    def read(self, name):
        """The tensor, in the memory of its file."""
        (dtype, shape), (path, begin) = self.infos[name], self.places[name]
        with naming(path), open(path, "rb") as file:
            if path not in self.maps:
                self.maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            count = math.prod(shape)
            return torch.frombuffer(self.maps[path], dtype=torch_dtype(dtype), count=count, offset=begin).view(
                shape) if count else torch.empty(shape, dtype=torch_dtype(dtype))
