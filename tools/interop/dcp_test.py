#!/usr/bin/env python3
"""Tests of dcp.py. What needs torch is skipped where that is not; checkpoint_with_python runs it where it is."""
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import dcp
import files
from files import Refused, torch

needs_torch = unittest.skipIf(torch is None, "there is no torch")
if torch is not None:
    import torch.distributed.checkpoint as torch_dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    torch.set_num_threads(1)

ADAMW = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0, "amsgrad": False, "maximize": False, "foreach": None,
         "capturable": True, "differentiable": False, "fused": True, "decoupled_weight_decay": True, "initial_lr": 1.0}
STEPPED = {"step": 3.0, "exp_avg": True, "exp_avg_sq": True}


class NamesTest(unittest.TestCase):
    def names(self, paths, objects=()):
        by_name = {".".join(map(str, path)): tuple(path) for path in paths}
        return dcp.Names(by_name, set(by_name) - set(objects))

    def test_plain(self):
        found = self.names([["model", "a.w"], ["optim", "state", "a.w", "exp_avg"], ["optim", "param_groups", 0, "lr"], ["step"]],
                           ["optim.param_groups.0.lr", "step"])
        self.assertEqual(found.model, {"a.w": "model.a.w"})
        self.assertEqual(found.states, {"a.w": {"exp_avg": "optim.state.a.w.exp_avg"}})
        self.assertEqual(found.groups, {0: {"lr": "optim.param_groups.0.lr"}})
        self.assertEqual((found.others, found.items), ({"step"}, {"optim"}))

    def test_in_an_item_of_its_own(self):
        found = self.names([["app", "model", "w"], ["app", "optim", "state", "w", "step"], ["epoch"]], ["epoch"])
        self.assertEqual((found.model, found.others), ({"w": "app.model.w"}, {"epoch"}))
        self.assertEqual(found.states, {"w": {"step": "app.optim.state.w.step"}})

    def test_torchtitan(self):
        found = self.names([["a.w"], ["optimizer", "state.a.w.step"], ["optimizer", "param_groups.a.w.lr"], ["train_state", "step"]],
                           ["optimizer.param_groups.a.w.lr", "train_state.step"])
        self.assertEqual((found.model, found.others), ({"a.w": "a.w"}, {"train_state"}))
        self.assertEqual(found.groups, {"a.w": {"lr": "optimizer.param_groups.a.w.lr"}})

    def test_megatron(self):
        found = self.names([["decoder.w"], ["chained_0.optimizer.state.exp_avg.w"], ["decoder._extra_state/0"]],
                           ["decoder._extra_state/0"])
        self.assertEqual(found.items, {"Megatron"})
        self.assertEqual((list(found.model), found.objects), (["decoder.w"], ["decoder._extra_state/0"]))


class OptimizerTest(unittest.TestCase):
    def record(self, options, states=None, **arguments):
        return dcp.optimizer_record([(["a"], options)], {"a": STEPPED} if states is None else states, **arguments)

    def test_what_it_becomes(self):
        record = self.record(ADAMW)
        self.assertEqual(record["groups"], [{"options": {"class": "AdamW", "lr": 0.5, "betas": (0.5, 0.75), "eps": 1e-8,
                                                         "weight_decay": 0, "amsgrad": False}, "parameters": ["a"]}])
        self.assertEqual((record["slots"], record["numbers"]), (["exp_avg", "exp_avg_sq"], {"a": {"step": 3}}))

    def test_classes(self):
        self.assertEqual(dcp.class_of(ADAMW), "AdamW")
        self.assertEqual(dcp.class_of({**ADAMW, "decoupled_weight_decay": False}), "Adam")
        for name in ("SGD", "Adagrad", "RMSprop"):
            self.assertEqual(dcp.class_of(dict.fromkeys(dcp.OPTIONS[name])), name)
        old = {key: value for key, value in ADAMW.items() if key != "decoupled_weight_decay"}
        with self.assertRaisesRegex(Refused, "Adam or AdamW: say --optimizer=AdamW"):
            self.record(old)
        self.assertEqual(self.record(old, name="Adam")["groups"][0]["options"]["class"], "Adam")
        with self.assertRaisesRegex(Refused, "LibTorch has no optimizer with the options etas, lr"):
            self.record({"lr": 1, "etas": (1, 2)})

    def test_what_is_refused(self):
        for options, why in [({"maximize": True}, r"param_groups.0.maximize: AdamW of LibTorch has no such option"),
                             ({"layer_scale": 1}, r"param_groups.0.layer_scale: AdamW of LibTorch has no such option"),
                             ({"amsgrad": True}, "missing: max_exp_avg_sq of a")]:
            with self.assertRaisesRegex(Refused, why):
                self.record({**ADAMW, **options})
        with self.assertRaisesRegex(Refused, "decoupled_weight_decay: is that of AdamW"):
            self.record(ADAMW, name="Adam")
        with self.assertRaisesRegex(Refused, "maximize"):
            self.record({**ADAMW, "maximize": True}, lenient=True)
        with self.assertRaisesRegex(Refused, "param_groups.0.lr: missing"):
            self.record({key: value for key, value in ADAMW.items() if key != "lr"}, name="AdamW")
        self.record({**ADAMW, "layer_scale": 1}, lenient=True)
        for states, why in [({"step": 3}, "missing: exp_avg of a"), ({**STEPPED, "step": 2.5}, "step of a is 2.5, no count"),
                            ({**STEPPED, "row": True}, "AdamW of LibTorch has no state row, which a has")]:
            with self.assertRaisesRegex(Refused, why):
                self.record(ADAMW, {"a": states})
        self.record(ADAMW, {})  # not stepped yet
        with self.assertRaisesRegex(Refused, "there are no param_groups"):
            dcp.optimizer_record([], {})

    def test_groups(self):
        self.assertEqual(dcp.listed_groups({1: {"lr": 1, "params": ["b"]}, 0: {"lr": 1, "params": ["a"]}}),
                         [(["a"], {"lr": 1}), (["b"], {"lr": 1})])
        self.assertEqual(dcp.listed_groups({"b": {"lr": 1}, "a": {"lr": 2}, "c": {"lr": 1}}),
                         [(["b", "c"], {"lr": 1}), (["a"], {"lr": 2})])
        with self.assertRaisesRegex(Refused, "are no names: save what get_state_dict"):
            dcp.listed_groups({0: {"params": [0, 1]}})


def crc32c(data):
    """Bit by bit."""
    total = 0xFFFFFFFF
    for byte in data:
        total ^= byte
        for _ in range(8):
            total = total >> 1 ^ (total & 1) * 0x82F63B78
    return total ^ 0xFFFFFFFF


@needs_torch
class FoldersTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def path(self, name):
        return str(self.folder / name)

    def equal(self, found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def training(self, optimizer="AdamW", **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).bfloat16())
        parameters = list(model.parameters())
        groups = [{"params": parameters[:2], "lr": 0.25}, {"params": parameters[2:]}]
        return model, getattr(torch.optim, optimizer)(groups, **options)

    def stepped(self, optimizer="AdamW", **options):
        model, optimizer = self.training(optimizer, **options)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return model, optimizer

    def save(self, name, model, optimizer, **more):
        model_state, optim_state = get_state_dict(model, optimizer)
        torch_dcp.save({"model": model_state, "optim": optim_state, **more}, checkpoint_id=self.path(name), no_dist=True)

    def test_there_and_back(self):
        for name, options in [("AdamW", {"fused": True}), ("Adam", {"amsgrad": True}), ("RMSprop", {"momentum": 0.5, "centered": True}),
                              ("Adagrad", {}), ("SGD", {"momentum": 0.5, "lr": 0.125})]:
            with self.subTest(name):
                model, optimizer = self.stepped(name, **options)
                self.save(name, model, optimizer, epoch=1)
                step = ["--step=2"] if name == "SGD" else []
                said = dcp.main(["import", self.path(name), self.path(name + "-ours"), *step])
                self.assertIn(f"left out: epoch; step 2, 2 groups of {name}", said)
                dcp.main(["export", self.path(name + "-ours"), self.path(name + "-back")])
                other, into = self.training(name, **options)
                states = get_state_dict(other, into)
                torch_dcp.load({"model": states[0], "optim": states[1]}, checkpoint_id=self.path(name + "-back"), no_dist=True)
                set_state_dict(other, into, model_state_dict=states[0], optim_state_dict=states[1])
                self.equal(other.state_dict(), model.state_dict())
                ours, theirs = into.state_dict(), optimizer.state_dict()
                self.equal(ours["state"], theirs["state"])
                for group, expected in zip(ours["param_groups"], theirs["param_groups"]):
                    self.assertEqual({**group, "fused": 0}, {**expected, "fused": 0})

    def test_torchtitan(self):
        model, optimizer = self.stepped()
        model_state, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        torch_dcp.save({**model_state, "optimizer": flat, "train_state": {"step": 2}}, checkpoint_id=self.path("a"), no_dist=True)
        self.assertIn("left out: train_state; step 2, 2 groups of AdamW", dcp.main(["import", self.path("a"), self.path("b")]))
        dcp.main(["export", "--torchtitan", self.path("b"), self.path("c")])
        again = {**{name: torch.zeros_like(value) for name, value in model_state.items()},
                 "optimizer": {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in flat.items()}}
        torch_dcp.load(again, checkpoint_id=self.path("c"), no_dist=True)
        options = {name for name, value in flat.items() if not isinstance(value, torch.Tensor)}
        for name in options:
            self.assertEqual(again["optimizer"].pop(name), None if name.endswith((".fused", ".foreach")) else flat[name], name)
        self.equal(again, {**model_state, "optimizer": {name: flat[name] for name in set(flat) - options}})

    def test_a_model_alone_and_in_parts(self):
        model, optimizer = self.stepped()
        self.save("all", model, optimizer)
        torch_dcp.save({"model": model.state_dict()}, checkpoint_id=self.path("model"), no_dist=True)
        dcp.main(["import", self.path("model"), self.path("a")])
        dcp.main(["import", "--model_only", "--max_file_bytes=40", self.path("all"), self.path("b")])
        dcp.main(["model", "--dtype=F64", self.path("b"), self.path("c")])
        for name in ("a", "b", "c"):
            found = files.Safetensors(sorted((self.folder / name).glob("*.safetensors")))
            for key, value in model.state_dict().items():
                read = found.read(key)
                self.assertEqual(read.dtype, torch.float64 if name == "c" and value.is_floating_point() else value.dtype)
                self.assertTrue(torch.equal(read.to(value.dtype), value))
        index = json.loads((self.folder / "b/model.safetensors.index.json").read_text())
        self.assertEqual(set(index["weight_map"]), set(model.state_dict()))
        self.assertGreater(len(set(index["weight_map"].values())), 2)

    def test_pickled_models(self):
        tensors = {"w": torch.arange(6.).view(2, 3).t(), "tied": torch.ones(2), "n": torch.tensor(3)}
        torch.save({"model": tensors, "epoch": 3}, self.path("new.pt"))
        torch.save({"model": tensors, "epoch": 3}, self.path("old.bin"), _use_new_zipfile_serialization=False)
        for name in ("new.pt", "old.bin"):
            self.assertIn("left out: 1 others", dcp.main(["model", "--prefix=model.", self.path(name), self.path(name + "-out")]))
            found = files.Safetensors([self.folder / (name + "-out") / "model.safetensors"])
            self.equal({key: found.read(key) for key in tensors}, tensors)
        with self.assertRaisesRegex(Refused, "no tensors whose names begin with \"x\""):
            dcp.main(["model", "--prefix=x", self.path("new.pt"), self.path("x")])
        torch.save({"w": torch.tensor([1e30])}, self.path("large.pt"))
        with self.assertRaisesRegex(Refused, "w has a value that would become infinite in F16"):
            dcp.main(["model", "--dtype=F16", self.path("large.pt"), self.path("x")])
        torch.save(tempfile.TemporaryDirectory, self.path("evil.pt"))
        with self.assertRaisesRegex(Refused, "evil.pt: "):
            dcp.main(["model", self.path("evil.pt"), self.path("x")])
        self.assertEqual([path.name for path in self.folder.iterdir() if path.name.startswith("x")], [])

    def test_never_writes_over(self):
        torch.save({"w": torch.ones(1)}, self.path("m.pt"))
        for taken in ("out", "out.incomplete"):
            os.mkdir(self.path(taken))
            with self.assertRaisesRegex(Refused, f"{taken}.* is there already|{taken}: .*File exists"):
                dcp.main(["model", self.path("m.pt"), self.path("out")])
            os.rmdir(self.path(taken))

    def test_what_is_refused(self):
        model, optimizer = self.stepped()
        torch_dcp.save({"model": {**model.state_dict(), "_extra_state": [1]}}, checkpoint_id=self.path("extra"), no_dist=True)
        with self.assertRaisesRegex(Refused, "model._extra_state of the model is no tensor"):
            dcp.main(["import", self.path("extra"), self.path("out")])
        self.assertIn("left out: model._extra_state", dcp.main(["import", "--lenient", self.path("extra"), self.path("lenient")]))
        torch_dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=self.path("plain"), no_dist=True)
        with self.assertRaisesRegex(Refused, "save what get_state_dict"):
            dcp.main(["import", self.path("plain"), self.path("out")])
        with self.assertRaisesRegex(Refused, "nowhere"):
            dcp.main(["import", self.path("nowhere"), self.path("out")])
        self.save("run", *self.stepped())
        dcp.main(["import", self.path("run"), self.path("ours")])
        weights = next((self.folder / "ours").glob("step-2/model.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
        with self.assertRaisesRegex(Refused, "model.safetensors is damaged"):
            dcp.main(["export", self.path("ours"), self.path("out")])
        os.truncate(next((self.folder / "run").glob("*.distcp")), 1000)
        with self.assertRaisesRegex(Refused, "run: "):
            dcp.main(["import", self.path("run"), self.path("out")])
        self.assertFalse((self.folder / "out").exists() or (self.folder / "out.incomplete").exists())

    def test_checksums(self):
        data = os.urandom(1 << 20) + b"123456789"
        entry = files.Crc32c().entry(io.BytesIO(data))
        self.assertEqual(entry["bytes"], len(data))
        self.assertEqual(entry["blocks"], f"{crc32c(data[:1 << 20]):08x}e3069283")
        self.assertEqual(entry["crc32c"], f"{crc32c(data):08x}")


class HelpTest(unittest.TestCase):
    def test_every_command_has_some(self):
        for words in ([], ["import"], ["export"], ["model"]):
            text = io.StringIO()
            with self.assertRaises(SystemExit), contextlib.redirect_stdout(text):
                dcp.main([*words, "--help"])
            self.assertIn("usage: ", text.getvalue())


if __name__ == "__main__":
    unittest.main()
