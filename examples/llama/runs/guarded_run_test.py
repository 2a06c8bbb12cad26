#!/usr/bin/env python3
"""A run of //examples/llama:train that guards itself: signals, numbers that are not finite, and what is refused before it
begins. The program is this test's runfile; the model is tiny and written here.
"""
import hashlib
import json
import math
import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import unittest

TRAIN = "examples/llama/train"
WIDTH, INNER, LAYERS, VOCAB = 32, 64, 2, 256
CONFIG = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER,
          "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
          "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True}


def tensors(vocab=VOCAB):
    """Random values, by name."""
    draw = random.Random(0)
    shapes = {"model.embed_tokens": (vocab, WIDTH), "model.norm": (WIDTH,)}
    for layer in range(LAYERS):
        for name, shape in {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
                            "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
                            "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
                            "mlp.down_proj": (WIDTH, INNER), "input_layernorm": (WIDTH,),
                            "post_attention_layernorm": (WIDTH,)}.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    found = {}
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [draw.gauss(0, 0.05) for _ in range(count)] if len(shape) > 1 else [1.0] * count
        found[name + ".weight"] = (shape, values)
    return found


def write_model(folder, found):
    folder.mkdir()
    header, data = {}, b""
    for name, (shape, values) in found.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    vocab = found["model.embed_tokens.weight"][0][0]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab}))


def descendants(pid):
    children = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    children.append(int(entry.name))
            except (OSError, ValueError):  # it has ended
                pass
    return sorted(children)


class GuardedRunTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        draw = random.Random(1)
        words = "to be or not that is the question".split()
        (self.root / "text").write_text(" ".join(draw.choice(words) for _ in range(4000)))
        write_model(self.root / "model", tensors())
        self.save = self.root / "save"

    def command(self, *flags, model="model", ranks=2):
        return [TRAIN, f"--model={self.root / model}", f"--data={self.root / 'text'}", f"--ranks={ranks}",
                "--threads=1", "--seq=32", "--batch=4", "--precision=fp32", "--log_every=1", *flags]

    def run_program(self, *flags, code=0, **others):
        result = subprocess.run(self.command(*flags, **others), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, timeout=240, check=False)
        self.assertEqual(result.returncode, code, result.stdout)
        return result.stdout

    def steps(self):
        return sorted(int(folder.name[5:]) for folder in self.save.glob("step-*"))

    def losses(self, path):
        """By step, of the last run that had it."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def stop(self, flags, number, to_rank, ranks):
        """Sends the signal once a step is done; the last step that is said to be saved."""
        process = subprocess.Popen(self.command(*flags, ranks=ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True)
        output = []
        for line in process.stdout:
            output.append(line)
            if "step 3/" in line:
                break
        victim = descendants(process.pid)[to_rank] if to_rank is not None else process.pid
        os.kill(victim, number)
        output += process.stdout.readlines()
        process.stdout.close()
        text = "".join(output)
        self.assertEqual(process.wait(timeout=240), 128 + number, text)
        said = [line for line in output if "CANCELLED: stopped by signal" in line]
        self.assertEqual(len(said), 1, text)
        self.assertIn("of which there is a checkpoint", said[0])
        return int(said[0].partition("after step ")[2].partition(",")[0])

    def test_a_signal_saves_and_the_rest_has_the_losses_of_an_unbroken_run(self):
        flags = ("--steps=400", "--lr=1e-3")
        self.run_program(*flags, f"--metrics={self.root / 'whole'}")
        whole = self.losses(self.root / "whole")
        self.assertEqual(len(whole), 400)
        cases = [(signal.SIGTERM, None, 2), (signal.SIGUSR1, None, 2), (signal.SIGTERM, 1, 2), (signal.SIGUSR1, 0, 2),
                 (signal.SIGTERM, None, 1)]
        for i, (number, to_rank, ranks) in enumerate(cases):
            with self.subTest(signal=number, to_rank=to_rank, ranks=ranks):
                self.save = self.root / f"save{i}"
                metrics = self.root / f"metrics{i}"
                kept = (*flags, f"--save={self.save}", f"--metrics={metrics}")
                step = self.stop(kept, number, to_rank, ranks)
                self.assertEqual(self.steps(), [step])
                self.run_program(*kept, "--resume", ranks=ranks)
                self.assertIn({"goes_on_after": step}, [json.loads(line) for line in metrics.read_text().splitlines()])
                if ranks == 2:
                    self.assertEqual(self.losses(metrics), whole)

    def test_a_weight_that_is_not_finite_ends_the_run_and_keeps_what_is_good(self):
        flags = (f"--save={self.save}", "--save_every=1", "--keep_last=1", "--resume", "--skip_nonfinite=1")
        self.run_program(*flags, "--steps=2")
        broken = tensors()
        broken["model.layers.1.mlp.up_proj.weight"][1][7] = float("inf")
        write_model(self.root / "broken", broken)
        output = self.run_program("--steps=20", f"--export={self.root / 'exported'}", "--save_every=1", "--keep_last=1",
                                  f"--save={self.root / 'other'}", "--resume", "--max_restarts=3", model="broken",
                                  code=2)
        self.assertIn("not restarted: exit code 2 says that it would fail again", output)
        self.assertIn("step 1: the loss of rank 0 is ", output)
        self.assertEqual(output.count("layers.1.mlp.up_proj.weight is the first parameter with a value that is not"), 1)
        self.assertFalse((self.root / "exported").exists())
        self.assertEqual(list((self.root / "other").glob("step-*")), [])
        output = self.run_program(f"--save={self.root / 'third'}", "--skip_nonfinite=2", "--steps=20", model="broken",
                                  code=2)
        self.assertIn("step 3: ", output)
        self.assertIn("The step is left out, 2 of at most 2 in a row", output)
        # A rate that no model survives: what is kept has no value that is not finite.
        self.run_program(*flags, "--steps=20", "--lr=1e3", "--lr_floor=1", "--warmup=0", "--clip=0", code=2)
        self.assertTrue(self.steps())
        for file in self.save.glob("step-*/model.safetensors"):
            data = file.read_bytes()
            begin = 8 + struct.unpack("<Q", data[:8])[0]
            values = struct.unpack(f"<{(len(data) - begin) // 4}f", data[begin:])
            self.assertTrue(all(map(math.isfinite, values)), file)

    def test_what_cannot_be_written_in_the_end_is_refused_at_the_beginning(self):
        (self.root / "file").write_text("")
        (self.root / "dangling").symlink_to(self.root / "nothing")
        for flag in ("export", "save_adapter"):
            for path in ("missing/parent", "file/below", "dangling", "model"):
                with self.subTest(flag=flag, path=path):
                    output = self.run_program("--lora_rank=2", f"--{flag}={self.root / path}", code=2)
                    self.assertIn(f"--{flag}: ", output)
                    self.assertIn(f"{self.root / path}", output)
                    if path == "missing/parent":
                        self.assertIn(f"there is no folder {self.root / 'missing'}", output)
                    self.assertNotIn("step 1/", output)
        self.assertEqual(sorted(path.name for path in self.root.iterdir()), ["dangling", "file", "model", "text"])

    def test_what_is_not_there_is_refused_by_name_and_not_tried_again(self):
        missing = self.root / "missing" / "it"
        for flag in ("model", "data", "eval_data", "save", "metrics"):
            with self.subTest(flag=flag):
                output = self.run_program("--resume", "--max_restarts=3", f"--save={self.save}",
                                          f"--metrics={self.root / 'metrics'}", f"--{flag}={missing}", code=2)
                self.assertIn("not restarted: exit code 2 says that it would fail again", output)
                self.assertIn("missing", output)
                self.assertFalse((self.root / "metrics").exists())
        self.assertIn(f"--metrics={missing}: No such file or directory", output)

    def test_what_rests_in_files_trains_alike(self):
        flags = ("--steps=4", "--lr=1e-3")
        self.run_program(*flags, f"--metrics={self.root / 'whole'}")
        for tiers in ("ssd", "parameters=ssd,gradients=cpu,optimizer=ssd"):
            metrics = self.root / tiers
            output = self.run_program(*flags, f"--metrics={metrics}", f"--offload={tiers}",
                                      f"--offload_dir={self.root}")
            self.assertIn("rests, in MiB", output)
            self.assertEqual(self.losses(metrics), self.losses(self.root / "whole"))
        for wrong, text in {("--offload=disk",): "--offload=disk: expected none, cpu or ssd",
                            ("--offload=ssd",): "--offload to ssd needs --offload_dir=DIR",
                            ("--offload=ssd", f"--offload_dir={self.root / 'text'}"): "there is no such folder",
                            ("--capture",): "--capture needs --device=cuda"}.items():
            self.assertIn(text, self.run_program(*wrong, code=2))

    def test_a_signal_after_the_last_step_changes_nothing_and_the_export_can_be_made_again(self):
        for ranks in (1, 2):
            self.save = self.root / f"save{ranks}"
            # The evaluation takes longer than the signal.
            flags = ("--steps=4", f"--save={self.save}", f"--export={self.root / 'exported'}",
                     f"--eval_data={self.root / 'text'}")
            process = subprocess.Popen(self.command(*flags, ranks=ranks), stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, text=True)
            output = []
            for line in process.stdout:
                output.append(line)
                if "step 4/" in line:
                    break
            process.send_signal(signal.SIGTERM)
            output += process.stdout.readlines()
            process.stdout.close()
            self.assertEqual(process.wait(timeout=240), 0, "".join(output))
            self.assertEqual(self.steps(), [4])
            # As if it had been broken off.
            shutil.rmtree(self.root / "exported")
        output = self.run_program(*flags, "--resume")
        self.assertIn("nothing to train: the checkpoint has step 4 of 4", output)
        self.assertIn("step 4: evaluation loss", output)
        self.assertTrue((self.root / "exported" / "model.safetensors").exists())
        # A job that is done may be started again, which changes nothing. One that is not has nowhere to export to.
        self.assertIn("exported is there already", self.run_program(*flags, "--resume"))
        self.assertIn("exported is there already", self.run_program(*flags, "--resume", "--steps=5", code=2))
        self.assertEqual(self.steps(), [4])

    def test_an_export_that_was_broken_off_behind_the_adapter_can_be_made_again(self):
        adapter, exported = self.root / "adapter", self.root / "exported"

        def files(folder):
            return {file.name: file.read_bytes() for file in folder.iterdir()}

        flags = ("--lora_rank=2", f"--save={self.save}", "--resume", "--lr=0.1", f"--save_adapter={adapter}",
                 f"--export={exported}")
        self.run_program(*flags, "--steps=2")
        written, whole = files(adapter), files(exported)
        shutil.rmtree(exported)
        self.run_program(*flags, "--steps=2", ranks=1)
        self.assertEqual(files(adapter), written)
        self.assertEqual(files(exported), whole)
        shutil.rmtree(exported)
        # Of a run that goes on, or with other values, or no adapter at all, it may be somebody else's.
        self.assertNotIn("step 3", self.run_program(*flags, "--steps=3", code=2))
        weights = bytearray(written["adapter_model.safetensors"])
        weights[-1] ^= 1
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        for _ in range(2):
            kept = files(adapter)
            output = self.run_program(*flags, "--steps=2", code=2)
            self.assertIn(f"{adapter} is there already and is not written over", output)
            self.assertEqual(files(adapter), kept)
            (adapter / "adapter_model.safetensors").unlink(missing_ok=True)

    def test_says_which_flags_are_others_than_those_of_the_checkpoint(self):
        flags = (f"--save={self.save}", "--resume")
        self.run_program(*flags, "--steps=2")
        self.assertNotIn("checkpoint is of a run", self.run_program(*flags, "--steps=3"))
        (self.root / "other").write_text((self.root / "text").read_text())
        output = self.run_program(*flags, "--steps=1", "--seq=16", "--seed=5", f"--data={self.root / 'other'}")
        for changed in ("--seq=16: the checkpoint is of a run with --seq=32",
                        "--seed=5: the checkpoint is of a run with --seed=1",
                        f"--data={self.root / 'other'}: the checkpoint is of a run with --data={self.root / 'text'}",
                        "nothing to train: the checkpoint has step 3 of 1"):
            self.assertEqual(output.count(changed), 1, output)

    def test_resume_says_where_it_finds_nothing(self):
        output = self.run_program(f"--save={self.save}", "--resume=required", "--steps=1", code=2)
        self.assertIn(f"--resume: there is no checkpoint in {self.save}", output)
        self.assertFalse(self.save.exists())
        output = self.run_program(f"--save={self.save}", "--resume", "--steps=1")
        self.assertEqual(output.count(f"--resume: there is no checkpoint in {self.save}: begins at step 1"), 1)
        self.run_program(f"--save={self.save}", "--resume=required", "--steps=2")

    def test_the_folder_may_have_what_such_folders_have(self):
        """Constants of older releases among the weights, and files beside them; not the same ones on all hosts."""
        older = tensors()
        for layer in range(LAYERS):
            older[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = ((4,), [1.0, 0.1, 0.01, 0.001])
        folders = [self.root / name for name in ("older", "elsewhere")]
        for folder in folders:
            write_model(folder, older)
        for name in ("model.safetensors.sha256", "model.safetensors.index.json.bak", "README.md"):
            (folders[0] / name).write_text(name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        exported = self.root / "exported"
        processes = [
            subprocess.Popen(self.command("--steps=1", f"--export={exported}", f"--save={self.save}", model=folder),
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                  "MASTER_PORT": str(port)})
            for rank, folder in enumerate(folders)]
        for process in processes:
            output = process.communicate(timeout=240)[0]
            self.assertEqual(process.returncode, 0, output)
        self.assertEqual(sorted(file.name for file in exported.iterdir()),
                         ["README.md", "config.json", "model.safetensors"])
        self.assertEqual((self.save / "step-1/README.md").read_text(), "README.md")

    def test_ranks_have_the_same_flags_and_rows(self):
        (self.root / "longer").write_text((self.root / "text").read_text() * 2)
        for others, what in ((["--lr=1"], "lr"), ([f"--data={self.root / 'longer'}"], "rows")):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            processes = [subprocess.Popen(
                self.command("--steps=1", *(others if rank == 1 else [])), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                     "MASTER_PORT": str(port)}) for rank in range(2)]
            for process in processes:
                output = process.communicate(timeout=240)[0]
                self.assertEqual(process.returncode, 2, output)
                self.assertIn("flags or files of tokens of ranks differ", output)
                self.assertIn(f"{what} ", output)

    def test_weight_decay_is_that_of_the_command_line(self):
        flags = ("--lr=0.1", "--resume")
        self.run_program(*flags, f"--save={self.save}", "--steps=2", "--warmup=0")
        exported = []
        for decay in (0, 5):
            again = self.root / f"again{decay}"
            shutil.copytree(self.save, again)
            self.run_program(*flags, f"--save={again}", "--steps=3", "--warmup=0", f"--weight_decay={decay}",
                             f"--export={self.root / f'exported{decay}'}")
            exported.append((self.root / f"exported{decay}" / "model.safetensors").read_bytes())
        self.assertNotEqual(*exported)

    def test_says_what_is_odd_about_its_data(self):
        output = self.run_program("--steps=1", "--seq=600", "--batch=2", ranks=1)
        self.assertEqual(output.count("--seq=600 is longer than the 512 positions"), 1)
        (self.root / "model" / "tokenizer.json").write_text("{}")
        self.assertIn("they are bytes, not those of", self.run_program("--steps=1", code=2))
        write_model(self.root / "larger", tensors(300))
        said = f"there is no {self.root / 'larger'}/tokenizer.json: takes the bytes of {self.root / 'text'} for tokens"
        self.assertEqual(self.run_program("--steps=1", model="larger").count(said), 1)
        self.assertNotIn(said, self.run_program("--steps=1", "--from_scratch", model="larger"))

    def test_a_tokenizer_may_have_tokens_that_the_model_lacks(self):
        tokenizer = self.root / "model" / "tokenizer.json"
        tokenizer.write_text("{}")
        description = {"format": "fsdp-tokens", "version": 1, "dtype": "uint16", "num_tokens": 129, "num_documents": 0,
                       "vocab_size": VOCAB + 4, "bos_id": None, "eos_id": None,
                       "tokenizer_sha256": hashlib.sha256(b"{}").hexdigest()}
        (self.root / "tokens.json").write_text(json.dumps(description))

        def train_on(last, code):
            (self.root / "tokens.bin").write_bytes(struct.pack("<129H", *[1] * 64, *[last] * 65))
            return self.run_program("--steps=1", f"--data={self.root / 'tokens.bin'}", code=code)

        train_on(VOCAB - 1, 0)
        self.assertIn(f"is {VOCAB}, but there are only {VOCAB} tokens", train_on(VOCAB, 1))
        tokenizer.unlink()
        self.assertIn(f"has tokens up to {VOCAB + 3}", train_on(VOCAB - 1, 2))


if __name__ == "__main__":
    unittest.main()
