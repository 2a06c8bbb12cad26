#!/usr/bin/env python3
"""Checks that Python's libraries read what //checkpoint writes, and that it reads what they write.

usage: check_with_python.py FOLDER_OF_BINARIES [--record DATA]      (the folder has sample_reader,
sample_writer and dcp_training)

Prints a line for each check, and at the end how many passed, failed and were skipped for want of a library; exits with 1
if any failed. --record: also makes the folders of `data`, which tests read where there is no Python.
"""
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import traceback
import zlib

CHECKS = []
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2"}
FORMAT_OF = {"torch." + name: key for key, name in DTYPES.items()}


class Failed(Exception):
    """What is not as it should be."""


def check(needs, *arguments):
    """A function of a Workplace, which is a check for each of `arguments`."""
    def add(function):
        for argument in arguments or [None]:
            CHECKS.append((function, needs.split(), argument))
        return function
    return add


def line_of(name, tensor):
    """What sample_reader prints of it."""
    import torch
    data = tensor.detach().contiguous().cpu().reshape(-1)
    data = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    sizes = ",".join(map(str, tensor.shape))
    return f"{name} {FORMAT_OF[str(tensor.dtype)]} [{sizes}] {zlib.crc32(data):08x}"


def lines_of(tensors):
    """Of a dict of tensors."""
    return sorted(line_of(name, tensor) for name, tensor in tensors.items())


def expect_same(ours, theirs):
    """Sorted lines."""
    if ours == theirs:
        return
    missing = [line for line in ours if line not in theirs]
    more = [line for line in theirs if line not in ours]
    raise Failed(f"//checkpoint has {missing[:3]}, Python has {more[:3]}, of {len(ours)} and {len(theirs)} tensors")


def like(lines):
    """Tensors to read into, of what `lines` say, all zero."""
    import torch
    tensors = {}
    for line in lines:
        name, dtype, sizes, _ = line.rsplit(" ", 3)
        tensors[name] = torch.zeros(json.loads(sizes)).to(getattr(torch, DTYPES[dtype]))
    return tensors


class Workplace:
    """A folder for one check, and our programs."""

    def __init__(self, binaries, folder, record):
        self.binaries, self.folder, self.record_to = binaries, folder, record

    def path(self, name):
        return str(self.folder / name)

    def run(self, program, *arguments):
        result = subprocess.run([str(self.binaries / program), *map(str, arguments)], text=True, capture_output=True,
                                check=False)
        if result.returncode:
            raise Failed(f"{program}: {result.stderr.strip()}")
        return result.stdout

    def interop(self, *arguments):
        """tools/interop/dcp.py"""
        script = pathlib.Path(__file__).resolve().parents[2] / "tools/interop/dcp.py"
        result = subprocess.run([sys.executable, str(script), *arguments], text=True, capture_output=True, check=False)
        if result.returncode:
            raise Failed(result.stderr.strip())

    def read(self, path):
        """What we read there, as sorted lines."""
        return sorted(self.run("sample_reader", path).splitlines())

    def write(self, source, form, name, ranks=1):
        """The path to it, and sorted lines."""
        self.run("sample_writer", source, form, self.path(name), ranks)
        return self.path(name), self.read(self.path(name))

    def record(self, name, path, lines):
        """`path`, a folder, for the tests of CI."""
        if self.record_to is None:
            return
        folder = pathlib.Path(self.record_to) / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copytree(path, folder / "model")
        (folder / "lines.txt").write_text("\n".join(lines) + "\n")


def samples():
    """Tensors of all sorts that torch has."""
    import torch
    generator = torch.Generator().manual_seed(1)
    return {"layers.0.weight": torch.randn(5, 7, generator=generator), "scalar": torch.tensor(2.5),
            "bias": torch.randn(11, generator=generator).bfloat16(), "empty": torch.empty(0, 3),
            "half": torch.randn(13, 3, generator=generator).half(), "double": torch.randn(2, 2, 2, generator=generator).double(),
            "i64": torch.tensor([1 << 40, -1]), "bool": torch.tensor([True, False, True]),
            "u8": torch.arange(5, dtype=torch.uint8),
            "f8": torch.randn(3, 5, generator=generator).to(torch.float8_e4m3fn)}


# --- safetensors --------------------------------------------------------------


def read_safetensors(paths):
    """All tensors of files, by safe_open."""
    from safetensors import safe_open
    tensors = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            if file.metadata().get("format") != "pt":
                raise Failed(f"{path} has metadata {file.metadata()}")
            tensors.update({name: file.get_tensor(name) for name in file.keys()})
    return tensors


@check("torch safetensors")
def safetensors_reads_one_file_of_ours(at):
    path, lines = at.write("pattern", "safetensors", "model")
    expect_same(lines, lines_of(read_safetensors([path + "/model.safetensors"])))


@check("torch safetensors")
def safetensors_reads_several_files_and_an_index_of_ours(at):
    path, lines = at.write("pattern", "huggingface", "model")
    index = json.loads(pathlib.Path(path, "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    if len(files) < 2:
        raise Failed(f"there are only the files {files}")
    tensors = read_safetensors([os.path.join(path, file) for file in files])
    expect_same(lines, lines_of(tensors))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if index["metadata"]["total_size"] != total:
        raise Failed(f"total_size is {index['metadata']['total_size']}, not {total}")


@check("torch safetensors")
def we_read_what_safetensors_writes(at):
    from safetensors.torch import save_file
    os.mkdir(at.path("model"))
    save_file(samples(), at.path("model/model.safetensors"), metadata={"format": "pt", "by": "safetensors"})
    lines = lines_of(samples())
    at.record("safetensors", at.path("model"), lines)
    expect_same(at.read(at.path("model")), lines)


# --- transformers -------------------------------------------------------------


def tiny_model(kind):
    """A model that transformers makes, of random weights."""
    import torch
    import transformers
    torch.manual_seed(1)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=48, n_positions=32, n_embd=16, n_layer=2, n_head=4))


def logits(model):
    """Of a fixed text."""
    import torch
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20).reshape(2, 10)).logits


@check("torch safetensors transformers", ("llama", None), ("llama", "8KB"), ("gpt2", None), ("gpt2", "8KB"))
def transformers_models_come_back_through_us(at, case):
    import torch
    kind, limit = case
    model = tiny_model(kind)
    model.save_pretrained(at.path("theirs"), **({} if limit is None else {"max_shard_size": limit}))
    files = sorted(pathlib.Path(at.path("theirs")).glob("*.safetensors"))
    if (len(files) > 1) != (limit is not None):
        raise Failed(f"transformers wrote {len(files)} files")
    lines = lines_of(read_safetensors(files))
    at.record("transformers_indexed" if limit else "transformers", at.path("theirs"), lines)
    expect_same(at.read(at.path("theirs")), lines)
    for form in ["safetensors", "huggingface"]:
        path, _ = at.write(at.path("theirs"), form, form)
        shutil.copy(at.path("theirs/config.json"), path)
        again, info = type(model).from_pretrained(path, output_loading_info=True)
        if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
            raise Failed(f"from_pretrained: {info}")
        if not torch.equal(logits(model), logits(again)):
            raise Failed(f"{form}: the logits are others")


# --- torch.save ---------------------------------------------------------------


@check("torch", "model.pt", "model.bin")
def we_read_what_torch_save_writes(at, name):
    """By way of dcp.py; the second in the format of before torch 1.6, which has no F8."""
    import torch
    tensors = {key: tensor for key, tensor in samples().items() if key != "f8" or name == "model.pt"}
    torch.save(tensors, at.path(name), _use_new_zipfile_serialization=name == "model.pt")
    at.interop("model", at.path(name), at.path("model"))
    expect_same(at.read(at.path("model")), lines_of(tensors))


# --- torch.distributed.checkpoint ---------------------------------------------


@check("torch", "model", None)
def we_read_what_dcp_save_writes(at, item):
    """By way of dcp.py, in an item of its own, and with the model at the top, as torchtitan has it."""
    import torch
    import torch.distributed.checkpoint as dcp
    state = {"model": samples()} if item else samples()
    state["optim"] = {"state": {"w": {"exp_avg": torch.ones(3)}}}
    dcp.save(state, checkpoint_id=at.path("dcp"), no_dist=True)
    at.interop("import", "--model_only", at.path("dcp"), at.path("model"))
    expect_same(at.read(at.path("model")), lines_of(samples()))


def ranks_of(function, at, *arguments, ranks=2):
    """Runs it on gloo ranks: function(rank, folder, ...)."""
    import torch.multiprocessing as mp
    mp.spawn(run_rank, (ranks, function, at.path("store"), *arguments), nprocs=ranks)


def run_rank(rank, ranks, function, store, *arguments):
    """One of the processes."""
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's own end sometimes aborts in a thread of gloo's


def sharded_model(seed):
    """Sharded by FSDP2, with sizes that two ranks cannot share evenly; and its whole state dict."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3, bias=False),
                                torch.nn.Linear(3, 1))
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, whole


def save_fsdp2(rank, folder, form):
    """As a trainer does."""
    import torch
    import torch.distributed.checkpoint as dcp
    model, whole = sharded_model(seed=1)
    if form == "dcp":
        dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=folder)
    else:
        dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
    if rank == 0:
        torch.save(whole, folder + ".whole")


def load_fsdp2(_, folder):
    """Into a model with other values."""
    import torch
    import torch.distributed.checkpoint as dcp
    model, _ = sharded_model(seed=2)
    state = model.state_dict()
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
    model.load_state_dict(state)
    _, whole = sharded_model(seed=1)
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor.full_tensor(), whole[name]):
            raise Failed(f"{name} is another")


@check("torch safetensors", "dcp", "hf_shards")
def we_read_what_two_ranks_of_fsdp2_save(at, form):
    import torch
    ranks_of(save_fsdp2, at, at.path("model"), form)
    lines = lines_of(torch.load(at.path("model.whole"), weights_only=True))
    if form == "dcp":
        at.interop("import", at.path("model"), at.path("ours"))
    else:
        at.record("dcp_hf_shards", at.path("model"), lines)
    expect_same(at.read(at.path("ours" if form == "dcp" else "model")), lines)


@check("torch safetensors", ("shards", 1), ("shards", 3), ("safetensors", 1))
def two_ranks_of_fsdp2_load_ours(at, case):
    form, ranks = case
    ranks_of(save_fsdp2, at, at.path("theirs"), "hf_shards")
    os.remove(at.path("store"))
    path, _ = at.write(at.path("theirs"), form, "ours", ranks)
    ranks_of(load_fsdp2, at, path)


@check("torch safetensors", ("shards", 1), ("shards", 2), ("shards", 3), ("safetensors", 1), ("huggingface", 1))
def dcp_hugging_face_reader_loads_ours(at, case):
    import torch.distributed.checkpoint as dcp
    form, ranks = case
    path, lines = at.write("pattern", form, "model", ranks)
    state = like(lines)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)
    expect_same(lines, lines_of(state))


def training_run(name, from_ours):
    """The model and the optimizer of dcp_run.cc, as FSDP2."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    # What decides which states there are; all else is in the folder.
    options = {"Adam": {"amsgrad": True}, "SGD": {"momentum": 0.5}}.get(name, {})
    if not from_ours:
        options = {"AdamW": {"lr": 0.04, "weight_decay": 0.2, "betas": (0.7, 0.95), "fused": True},
                   "Adam": {"lr": 0.03, "amsgrad": True, "eps": 0.01, "weight_decay": 0.1},
                   "SGD": {"lr": 0.1, "momentum": 0.8, "nesterov": True}}[name]
    return model, getattr(torch.optim, name)(model.parameters(), **options)


def train(model, optimizer, steps):
    """The losses."""
    import torch
    losses = []
    for step in steps:
        rows = torch.sin(torch.arange(14) * 0.7 + step).view(2, 7)
        loss = model(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def go_on(_, folder, name, losses):
    """A run that dcp_training has begun."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model, optimizer = training_run(name, from_ours=True)
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    expect_near(train(model, optimizer, range(5, 10)), losses, 1e-6)


def begin(rank, folder, name, style):
    """A run that dcp_training goes on with; its own losses from there in a file beside it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    model, optimizer = training_run(name, from_ours=False)
    # It leaves a rate in the groups that only schedulers ask for.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    train(model, optimizer, range(5))
    if style == "torchtitan":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model_state, optim_state = get_state_dict(model, optimizer, options=options)
        state = {**model_state, "optimizer": optim_state, "lr_scheduler": scheduler.state_dict(), "train_state": {"step": 5}}
    else:
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optim_state, "step": 5}
        if style == "app":  # what objects with a state_dict(), as in PyTorch's tutorial, become
            state = {"app": state, "epoch": 1}
    dcp.save(state, checkpoint_id=folder)
    losses = train(model, optimizer, range(5, 10))
    if rank == 0:
        pathlib.Path(folder + ".losses").write_text("".join(f"{loss:.9g}\n" for loss in losses))


def floats(lines):
    """A number on each."""
    return [float(line) for line in lines.splitlines()]


def expect_near(losses, others, limit):
    """Of the steps from the fifth on."""
    if len(set(losses)) != 5 or len(others) != 5:
        raise Failed(f"losses are {losses} and {others}")
    for step, (loss, other) in enumerate(zip(losses, others), start=5):
        if abs(loss - other) > limit:
            raise Failed(f"step {step}: the loss is {loss}, and {other} where it began")


@check("torch", ("AdamW", 1), ("AdamW", 2), ("Adam", 2), ("SGD", 3))
def fsdp2_goes_on_where_three_of_our_ranks_were(at, case):
    name, ranks = case
    losses = floats(at.run("dcp_training", "save", at.path("ours"), name))
    at.interop("export", at.path("ours"), at.path("dcp"))
    ranks_of(go_on, at, at.path("dcp"), name, losses, ranks=ranks)


@check("torch", ("AdamW", "plain", 2), ("AdamW", "plain", 1), ("AdamW", "torchtitan", 2), ("Adam", "plain", 3),
       ("Adam", "torchtitan", 2), ("SGD", "plain", 2), ("SGD", "torchtitan", 2), ("Adam", "app", 2))
def three_of_our_ranks_go_on_where_fsdp2_was(at, case):
    name, style, ranks = case
    ranks_of(begin, at, at.path("model"), name, style, ranks=ranks)
    losses = floats(pathlib.Path(at.path("model.losses")).read_text())
    at.interop("import", at.path("model"), at.path("ours"), "--step=5")
    if name == "AdamW" and ranks == 2:
        at.record(f"dcp_adamw_{style}", at.path("ours"), [f"{loss:.9g}" for loss in losses])
    expect_near(floats(at.run("dcp_training", "load", at.path("ours"), name)), losses, 1e-6)


@check("torch", "AdamW")
def names_of_torchtitan_are_in_ours(at, name):
    import torch
    import torch.distributed.checkpoint as dcp
    at.run("dcp_training", "save", at.path("ours"), name)
    at.interop("export", "--torchtitan", at.path("ours"), at.path("dcp"))
    state = {"0.weight": torch.zeros(5, 7), "optimizer": {"state.0.weight.exp_avg": torch.zeros(5, 7),
                                                         "state.0.weight.step": torch.tensor(0.0),
                                                         "param_groups.2.weight.lr": 0.0,
                                                         "param_groups.2.weight.betas": (0.0, 0.0)}}
    dcp.load(state, checkpoint_id=at.path("dcp"), no_dist=True)
    optimizer = state["optimizer"]
    found = (optimizer["state.0.weight.step"].item(), optimizer["param_groups.2.weight.lr"],
             optimizer["param_groups.2.weight.betas"], optimizer["state.0.weight.exp_avg"].count_nonzero().item())
    if found != (5, 0.05, (0.8, 0.9), 35):
        raise Failed(f"it has {found}")


# --- All of them --------------------------------------------------------------


def version_of(library):
    """Empty where it cannot be imported."""
    try:
        return importlib.import_module(library).__version__
    except ImportError:
        return ""


def text_of(argument):
    """Of a check's case."""
    return ", ".join(str(part) for part in argument if part) if isinstance(argument, tuple) else str(argument)


def run_check(function, argument, binaries, record):
    """What went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        at = Workplace(binaries, pathlib.Path(folder), record)
        try:
            function(at, *([] if argument is None and function.__code__.co_argcount == 1 else [argument]))
        except Failed as error:
            return str(error)
        except Exception:  # of a library: it does not take what we wrote
            return traceback.format_exc()
    return ""


def main():
    """Runs all checks."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    binaries = pathlib.Path(sys.argv[1])
    record = sys.argv[3] if sys.argv[2:3] == ["--record"] else None
    versions = {library: version_of(library) for library in ["torch", "safetensors", "transformers"]}
    print("with", ", ".join(f"{library} {version or '(not there)'}" for library, version in versions.items()))
    passed = failed = skipped = 0
    for function, needs, argument in CHECKS:
        name = function.__name__.replace("_", " ") + ("" if argument is None else f" ({text_of(argument)})")
        missing = [library for library in needs if not versions[library]]
        if missing:
            skipped += 1
            print(f"skipped  {name}: there is no {' and no '.join(missing)}", flush=True)
            continue
        problem = run_check(function, argument, binaries, record)
        passed, failed = (passed, failed + 1) if problem else (passed + 1, failed)
        print(f"FAILED   {name}: {problem}" if problem else f"ok       {name}", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
