#!/usr/bin/env python3
"""Takes runs and models over from PyTorch, and hands runs to it, by torch's own torch.distributed.checkpoint (DCP).

Streams: one tensor is in memory at a time. Needs torch, and nothing else; tried with torch 2.11. Ends with 0; with 1
after an error. OUT is a new folder, which appears when it is whole.
"""
import argparse
import json
import math
import pathlib
import re
import sys
import warnings

from files import FORMATS, Refused, Safetensors, checked_files, naming, new_folder, torch, torch_dtype, write_file, \
    write_manifest, write_tensors

ADAM = ["lr", "betas", "eps", "weight_decay", "amsgrad"]
# Options and states of the classes of torch::optim, and the option that asks for a state.
OPTIONS = {"SGD": ["lr", "momentum", "dampening", "weight_decay", "nesterov"], "Adam": ADAM, "AdamW": ADAM,
           "Adagrad": ["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"],
           "RMSprop": ["lr", "alpha", "eps", "weight_decay", "momentum", "centered"]}
STATES = {"SGD": [], "Adam": ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"], "Adagrad": ["step", "sum"],
          "RMSprop": ["step", "square_avg", "momentum_buffer", "grad_avg"]}
STATES["AdamW"] = STATES["Adam"]
ASKED_FOR_BY = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
# Of PyTorch: they change nothing of what a step computes, or schedulers keep them there.
NO_EFFECT = {"foreach", "fused", "capturable", "differentiable", "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr",
             "base_momentum", "max_momentum"}
MEGATRON_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


# --- What a DCP folder has ----------------------------------------------------


class Names:
    """What the names of a state dict stand for. paths: the keys that each is made of; tensors: the names of tensors."""

    def __init__(self, paths, tensors):
        self.model, self.objects, self.others, self.items = {}, [], set(), set()
        self.states, self.groups = {}, {}  # by parameter; by number, or by parameter: {key: name}
        first = {paths[name][0] for name in tensors}
        is_wrapped = len(first) == 1 and not first & {"model", "optim", "optimizer"}
        if is_wrapped and all(len(paths[name]) > 2 for name in tensors):
            paths = {name: path[path[0] in first:] for name, path in paths.items()}  # {"app": {"model": ..., ...}}
        has_item = any(len(paths[name]) > 1 and paths[name][0] == "model" for name in tensors)
        for name, path in paths.items():
            if len(path) > 2 and path[1] == "param_groups" and isinstance(path[2], int):
                self.groups.setdefault(path[2], {})[".".join(map(str, path[3:]))] = name
                self.items.add(path[0])
            elif len(path) > 1 and path[0] in ("optim", "optimizer"):
                entry = re.fullmatch(r"(state|param_groups)\.(.+)\.([^.]+)", ".".join(map(str, path[1:])))
                if not entry:
                    raise Refused(f"{name} is of an optimizer that is not as torch 2.4 and newer ones save it")
                (self.states if entry[1] == "state" else self.groups).setdefault(entry[2], {})[entry[3]] = name
                self.items.add(path[0])
            elif MEGATRON_OPTIMIZER.match(name):
                self.items.add("Megatron")
            elif path[0] != "model" if has_item else len(path) > 1 or name not in tensors and "_extra_state" not in name:
                self.others.add(str(path[0]))
            elif name in tensors:
                self.model[".".join(map(str, path[has_item:]))] = name
            else:
                self.objects.append(name)


class Dcp:
    """A folder, by torch's reader, a tensor or a value at a time."""

    def __init__(self, folder):
        from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

        class Planner(DefaultLoadPlanner):
            """Executes nothing that values are pickled as."""

            def load_bytes(self, read_item, value):
                self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

        self.folder, self.planner = folder, Planner(flatten_state_dict=False)
        with naming(folder):
            self.reader = FileSystemReader(folder)
            self.metadata = self.reader.read_metadata()
            self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
            entries = self.metadata.state_dict_metadata
            self.tensors = {name: entry for name, entry in entries.items() if hasattr(entry, "chunks")}
            paths = self.metadata.planner_data or {}
            self.names = Names({name: paths.get(name, (name,)) for name in entries}, self.tensors)

    def infos(self, names):
        """(dtype, shape) of tensors."""
        infos = {}
        for key, name in names.items():
            entry = self.tensors[name]
            infos[key] = (FORMATS.get(str(entry.properties.dtype)), list(entry.size))
            if not infos[key][0] or sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise Refused(f"{name} is incomplete, or of {entry.properties.dtype}, which our files lack")
        return infos

    def read(self, name):
        """The tensor or the value."""
        state = {name: None}
        if name in self.tensors:
            state[name] = torch.empty(self.tensors[name].size, dtype=self.tensors[name].properties.dtype)
        with naming(f"{self.folder}: {name}"):
            self.planner.set_up_planner(state, self.metadata, is_coordinator=True)
            self.reader.read_data(self.planner.create_local_plan(), self.planner)
        return self.planner.state_dict[name]

    def value(self, name):
        """The same; a number where it is a tensor of one."""
        value = self.read(name)
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# --- Optimizers --------------------------------------------------------------


def class_of(options):
    """Of torch::optim, by the options of a group."""
    fits = [name for name, keys in OPTIONS.items() if set(keys) <= set(options)]
    if "decoupled_weight_decay" in options:
        fits = [name for name in fits if (name == "AdamW") == bool(options["decoupled_weight_decay"])]
    if len(fits) == 1:
        return fits[0]
    raise Refused(f"its optimizer may be {' or '.join(fits)}: say --optimizer={fits[-1]}, or the other" if fits else
                  f"LibTorch has no optimizer with the options {', '.join(sorted(options))}, but {', '.join(OPTIONS)}")


def listed_groups(stored):
    """[(names of parameters, options)]. stored: options by number, or by parameter, and then equal ones are a group."""
    groups = []
    for key in sorted(stored) if all(isinstance(key, int) for key in stored) else stored:
        options = dict(stored[key])
        names = options.pop("params", None) if isinstance(key, int) else [key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused("params of a group are no names: save what get_state_dict() of "
                          "torch.distributed.checkpoint.state_dict returns")
        same = [group for group in groups if isinstance(key, str) and group[1] == options]
        if same:
            same[0][0].extend(names)
        else:
            groups.append((list(names), options))
    return groups


def optimizer_record(groups, states, name=None, lenient=False):
    """What training.json says of it, whose types, names and shapes are checked when it is loaded. states: {parameter: {key:
    the step, or True}}."""
    if not groups:
        raise Refused("there are no param_groups")
    name = name or class_of(groups[0][1])
    record, problems = [], []
    for number, (names, options) in enumerate(groups):
        def refuse(key, why):
            problems.append(f"param_groups.{number}.{key}: {why}")
        for key in sorted((set(options) ^ set(OPTIONS[name])) - NO_EFFECT):
            value = options.get(key)
            if key not in options:
                refuse(key, "missing")
            elif key == "decoupled_weight_decay" and bool(value) != (name == "AdamW"):
                refuse(key, f"is that of {'AdamW' if value else 'Adam'}")
            elif key == "maximize" and value or key not in ("maximize", "decoupled_weight_decay") and not lenient:
                refuse(key, f"{name} of LibTorch has no such option")
        needed = [key for key in STATES[name] if key not in ASKED_FOR_BY or options.get(ASKED_FOR_BY[key])]
        problems += [f"missing: {key} of {one}" for one in names if one in states for key in needed if key not in states[one]]
        known = {key: options.get(key) for key in OPTIONS[name]}
        record.append({"options": {"class": name, **known}, "parameters": names})
    for one, keys in states.items():
        problems += [f"{name} of LibTorch has no state {key}, which {one} has"
                     for key in set(keys) - set(STATES[name]) - {"momentum_buffer"}]
        if not isinstance(keys.get("step", 0), (int, float)) or keys.get("step", 0) != abs(int(keys.get("step", 0))):
            problems.append(f"step of {one} is {keys['step']}, no count")
    if problems:
        raise Refused(f"the optimizer cannot be one of LibTorch's, {name}:\n  " + "\n  ".join(problems))
    return {"groups": record, "slots": sorted({key for keys in states.values() for key in keys} - {"step"}),
            "numbers": {one: {"step": int(keys["step"])} for one, keys in states.items() if "step" in keys}}


# --- Commands -----------------------------------------------------------------


def write_checkpoint(out, step, tensors, optimizer):
    """A folder of checkpoints with one. tensors: (infos, read) by the stem of their files."""
    folder = out / f"step-{step}"
    folder.mkdir()
    for stem, (infos, read) in tensors.items():
        write_tensors(folder, stem, infos, read)
    training = {"format": "libtorch_fsdp training state", "version": 1, "step": step, "world_size": 0,
                "optimizer": optimizer, "scheduler_steps": [], "plateaus": [], "entries": {}}
    write_file(folder / "training.json", [json.dumps(training, ensure_ascii=False, allow_nan=False).encode()])
    write_manifest(folder, step)
    write_file(out / ".libtorch_fsdp-checkpoints", [b"tools/interop/dcp.py\n"])
    write_file(out / "latest", [f"step-{step}\n".encode()])


def import_dcp(args):
    """A DCP folder as a checkpoint of ours, or as a model."""
    dcp = Dcp(args.dcp_folder)
    names, left_out = dcp.names, sorted(dcp.names.others) + dcp.names.objects
    if names.objects and not args.lenient:
        raise Refused(f"{names.objects[0]} of the model is no tensor, nor are {len(names.objects) - 1} others: --lenient "
                      "leaves them out")
    if (len(names.items) > 1 or "Megatron" in names.items) and not args.model_only:
        raise Refused(f"it has two optimizers, or one as Megatron keeps it ({names.items}): --model_only takes the model")
    tensors = {"model": (dcp.infos(names.model), lambda name: dcp.read(names.model[name]))}
    said = f"{args.out}: {len(names.model)} tensors of a model; left out: {', '.join(left_out) or 'nothing'}"
    if not names.model:
        raise Refused("it has no tensors of a model")
    if args.model_only or not names.items:
        with new_folder(args.out) as out:
            write_tensors(out, "model", *tensors["model"], args.max_file_bytes)
        return said + "; LoadModel() reads it"
    states = {one: {key: dcp.value(name) if name not in dcp.tensors or key == "step" else True for key, name in keys.items()}
              for one, keys in names.states.items()}
    states = {one: {key: value for key, value in keys.items() if value is not None} for one, keys in states.items()}
    groups = {key: {option: dcp.value(name) for option, name in options.items()} for key, options in names.groups.items()}
    record = optimizer_record(listed_groups(groups), states, args.optimizer, args.lenient)
    step = args.step if args.step is not None else max((one["step"] for one in record["numbers"].values()), default=None)
    if step is None:
        raise Refused("it does not say at which step it is: say --step=N")
    for slot in record["slots"]:
        of_slot = {one: names.states[one][slot] for one, keys in states.items() if slot in keys}
        tensors[f"optimizer/{slot}"] = (dcp.infos(of_slot), lambda name, of_slot=of_slot: dcp.read(of_slot[name]))
    with new_folder(args.out) as out:
        write_checkpoint(out, step, tensors, record)
    groups = record["groups"]
    return f"{said}; step {step}, {len(groups)} groups of {groups[0]['options']['class']}: LoadLatest() reads it"


def state_to_export(folder, torchtitan):
    """A state dict for dcp.save(), of tensors on the device "meta", which have read()."""
    paths = checked_files(folder)

    def tensors(stem):
        found = Safetensors(path for path in paths if re.fullmatch(
            rf"(shard-\d+-)?{stem}(-\d+(-of-\d+)?)*\.safetensors", "/".join(path.relative_to(folder).parts)))
        for name, (dtype, shape) in found.infos.items():
            tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
            tensor.read_it = lambda name=name: found.read(name)
            yield name, tensor

    with naming(folder / "training.json"):
        optimizer = json.loads((folder / "training.json").read_bytes()).get("optimizer")
    state = {"model": dict(tensors("model"))}
    if optimizer:
        states = {one: {key: torch.tensor(float(number)) for key, number in numbers.items()}
                  for one, numbers in optimizer["numbers"].items()}
        for slot in optimizer["slots"]:
            for name, tensor in tensors(f"optimizer/{slot}"):
                states.setdefault(name, {})[slot] = tensor
        groups = []
        for group in optimizer["groups"]:
            options = {key: tuple(value) if isinstance(value, list) else value for key, value in group["options"].items()}
            name = options.pop("class")
            options.update(maximize=False, foreach=None, differentiable=False)
            options.update({} if name in ("SGD", "Adagrad") else {"capturable": False})
            options.update({} if name == "RMSprop" else {"fused": None})
            options.update({"decoupled_weight_decay": name == "AdamW"} if OPTIONS[name] is ADAM else {})
            groups.append({**options, "params": group["parameters"]})
        state["optim"] = {"state": states, "param_groups": groups}
    if not torchtitan:
        return state
    flat = {f"state.{one}.{key}": value for one, keys in state.get("optim", {}).get("state", {}).items()
            for key, value in keys.items()}
    for group in state.get("optim", {}).get("param_groups", []):
        names = group.pop("params")
        flat.update({f"param_groups.{one}.{key}": value for one in names for key, value in group.items()})
    return {**state["model"], **({"optimizer": flat} if flat else {})}


def export_dcp(args):
    """A checkpoint of ours as a DCP folder."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save

    class Planner(DefaultSavePlanner):
        """Reads a tensor when it is written."""

        def lookup_object(self, index):
            found = super().lookup_object(index)
            return found.read_it() if hasattr(found, "read_it") else found

    folder = pathlib.Path(args.ours)
    if (folder / "latest").is_file():
        folder = folder / (folder / "latest").read_text().strip()
    state = state_to_export(folder, args.torchtitan)
    with new_folder(args.out) as out, naming(args.out):
        save(state, storage_writer=FileSystemWriter(out), planner=Planner(), no_dist=True)
    return f"{args.out}: {folder.name} for dcp.load()"


def pickled_tensors(path, prefix):
    """(tensors by name, number of other values) of a file of torch.save(), mapped into memory."""
    with naming(path):
        try:
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:  # of before torch 1.6, which is read as a whole
            if "mmap" not in str(error):
                raise
            value = torch.load(path, map_location="cpu", weights_only=True)
    tensors, others, left = {}, 0, [("", value)]
    for name, value in left:
        if isinstance(value, dict):
            left += [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        elif isinstance(value, torch.Tensor) and name.startswith(prefix):
            tensors[name[len(prefix):]] = value
        else:
            others += 1
    return tensors, others


def convert_model(args):
    """A model of torch.save(), or of safetensors, as a Hugging Face folder."""
    source, tensors, others = pathlib.Path(args.source), {}, 0
    files = [source]
    if source.is_dir():
        files = next((found for ending in ("*.index.json", "*.safetensors", "pytorch_model.bin", "*.bin", "*.pt", "*.pth")
                      if (found := sorted(source.glob(ending)))), [])
        if files and files[0].name.endswith(".index.json"):
            with naming(files[0]):
                weights = json.loads(files[0].read_bytes())["weight_map"]
            files = [source / name for name in sorted(set(weights.values()))]
        elif len(files) != 1 and not (files and files[0].suffix == ".safetensors"):
            raise Refused(f"{source} has {', '.join(file.name for file in files) or 'no model'}: name one file")
    safetensors = Safetensors(file for file in files if file.suffix == ".safetensors")
    infos = {name[len(args.prefix):]: info for name, info in safetensors.infos.items() if name.startswith(args.prefix)}
    for file in files if not safetensors.infos else []:
        more, other = pickled_tensors(file, args.prefix)
        if set(more) & set(tensors):
            raise Refused(f"{file}: {min(set(more) & set(tensors))} is in another file, too")
        tensors.update(more)
        others += other
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in FORMATS or tensor.layout != torch.strided:
            raise Refused(f"{source}: {name} is of {tensor.dtype}, {tensor.layout}, which safetensors files lack")
        infos[name] = (FORMATS[str(tensor.dtype)], list(tensor.shape))
    if not infos:
        raise Refused(f"{source} has no tensors whose names begin with \"{args.prefix}\"")
    cast = {name: (args.dtype if args.dtype and dtype in ("F64", "F32", "BF16", "F16") else dtype, shape)
            for name, (dtype, shape) in infos.items()}

    def read(name):
        tensor = tensors[name] if tensors else safetensors.read(args.prefix + name)
        result = tensor.detach().to(torch_dtype(cast[name][0]))
        if result.dtype != tensor.dtype and bool((result.isinf() & tensor.isfinite()).any()):
            raise Refused(f"{name} has a value that would become infinite in {args.dtype}: take another --dtype")
        return result

    with new_folder(args.out) as out:
        write_tensors(out, "model", cast, read, args.max_file_bytes)
    return f"{args.out}: {len(infos)} tensors" + (f"; left out: {others} others" if others else "")


def main(words):
    """Runs a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, function, text):
        one = commands.add_parser(name, help=text.split(".")[0], description=text)
        one.set_defaults(function=function)
        return one
    one = command("import", import_dcp, "A DCP folder becomes a checkpoint, or a model. One of FSDP2 (get_state_dict()) or "
                  "torchtitan becomes a folder for Checkpointer::LoadLatest(), by any number of ranks; one with a model "
                  "alone becomes a Hugging Face folder for LoadModel(). Schedulers, random states and all else are left "
                  "out: load without schedulers and scaler. torch executes the pickle .metadata: import what you trust.")
    one.add_argument("dcp_folder", metavar="DCP_FOLDER")
    one.add_argument("out", metavar="OUT")
    one.add_argument("--optimizer", choices=OPTIONS, help="its class in torch.optim, where the options do not tell it")
    one.add_argument("--step", type=int, help="of the checkpoint; otherwise the largest of the optimizer's")
    one.add_argument("--model_only", action="store_true", help="without the optimizer, as a Hugging Face folder")
    one.add_argument("--lenient", action="store_true", help="leave out objects of the model such as _extra_state, and "
                     "options of groups that LibTorch lacks")
    two = command("export", export_dcp, "A checkpoint of ours becomes a DCP folder. It has model and optimizer, for "
                  "dcp.load() of the state dicts of get_state_dict(), and set_state_dict(). Every byte is held against its "
                  "checksum.")
    two.add_argument("ours", metavar="OURS", help="a folder of checkpoints, of which the latest counts, or a step-N in it")
    two.add_argument("out", metavar="DCP_FOLDER")
    two.add_argument("--torchtitan", action="store_true", help="with its names: NAME, optimizer.state.NAME.exp_avg")
    three = command("model", convert_model, "A model of pickles or of safetensors becomes a Hugging Face folder. Nothing "
                    "that a file of torch.save() is pickled as is executed. Values that are no tensors are left out.")
    three.add_argument("source", metavar="IN", help="a file (.bin, .pt, .safetensors), or a folder with one or an index")
    three.add_argument("out", metavar="OUT")
    three.add_argument("--prefix", default="", help="only names that begin with it, without it")
    three.add_argument("--dtype", choices=("F64", "F32", "BF16", "F16"), help="of floating-point tensors in OUT")
    for with_limit in (one, three):
        with_limit.add_argument("--max_file_bytes", type=int, default=5_000_000_000, help="begin another file before this")
    args = parser.parse_args(words)
    if torch is None:
        raise Refused(f"{sys.executable} has no torch: take a Python that has it")
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
    torch.set_num_threads(1)  # the disk is what it waits for
    with naming(getattr(args, "dcp_folder", None) or getattr(args, "ours", None) or args.source):
        return args.function(args)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except Refused as error:
        sys.exit(f"dcp.py: {error}")
