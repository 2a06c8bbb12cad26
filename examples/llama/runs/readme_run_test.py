#!/usr/bin/env python3
"""Every command of examples/llama/README.md, in its order, with a tiny model in place of the one that it names.

The programs are this test's runfiles below examples/llama; bytes are the tokens, since the package tokenizers may be
missing.
"""
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

README = pathlib.Path("examples/llama/README.md")
CONFIG = {"model_type": "qwen2", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
# What makes a run long.
SHORTER = {"steps": 6, "seq": 32, "save_every": 3, "batch": 4}


def shorter(argument):
    flag = re.fullmatch(r"--(\w+)=\d+", argument)
    return f"--{flag[1]}={SHORTER[flag[1]]}" if flag and flag[1] in SHORTER else argument


def commands():
    for line in README.read_text().splitlines():
        if re.match(r"    (\./bazelw run|tools/)", line):
            yield [shorter(argument) for argument in shlex.split(line)]


class ReadmeRunTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        for folder in ("models/qwen", "data", "runs"):
            (self.root / folder).mkdir(parents=True)
        draw = random.Random(1)
        words = "to be or not that is the question".split()
        paragraphs = (" ".join(draw.choice(words) for _ in range(draw.randrange(5, 40))) for _ in range(200))
        (self.root / "data/books.txt").write_text("\n\n".join(paragraphs))

    def here(self, argument):
        """Paths of the README are below the test's folder."""
        return re.sub(r"(^|=)/(models|data|runs)", rf"\1{self.root}/\2", argument)

    def run_program(self, program, *arguments, code=0):
        environment = {**os.environ, "HOME": str(self.root)}
        result = subprocess.run([*program, *map(self.here, arguments)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, timeout=240, check=False, env=environment)
        self.assertEqual(result.returncode, code, f"{program} {arguments}\n{result.stdout}")
        return result.stdout

    def make_model(self):
        """As if it had been downloaded: random values, written by the program itself."""
        scratch = self.root / "scratch"
        scratch.mkdir()
        (scratch / "config.json").write_text(json.dumps(CONFIG))
        self.run_program(["examples/llama/train"], f"--model={scratch}", "--from_scratch", "--data=/data/books.txt",
                         "--steps=1", "--ranks=1", "--lr=0", "--precision=fp32", f"--export={self.root}/made")
        for file in (self.root / "made").iterdir():
            file.rename(self.root / "models/qwen" / file.name)

    def run_command(self, command):
        if command[0] == "./bazelw":
            target = next(argument for argument in command if argument.startswith("//"))
            program = ["examples/llama/" + target.rpartition(":")[2]]
            return self.run_program(program, *command[command.index("--") + 1:])
        arguments = ["--bytes" if argument.startswith("--tokenizer=") else argument for argument in command[1:]]
        return self.run_program([sys.executable, command[0]], *arguments)

    def test_all_commands_do_what_they_say(self):
        self.make_model()
        outputs = [self.run_command(command) for command in commands()]
        self.assertGreaterEqual(len(outputs), 5)
        for made in ("data/books.train.bin", "data/books.validation.bin", "runs/books/latest", "runs/books.jsonl",
                     "models/books/model.safetensors", "runs/adapter/adapter_model.safetensors",
                     "runs/adapter_2/adapter_config.json", "models/books_merged/config.json",
                     "runs/adapter_int8/adapter_model.safetensors", "models/books_int8/model.safetensors",
                     "models/finetuned/model.safetensors"):
            self.assertTrue((self.root / made).exists(), made)
        metrics = [json.loads(line) for line in (self.root / "runs/books.jsonl").read_text().splitlines()]
        self.assertEqual([line["step"] for line in metrics], [1, 2, 3, 4, 5, 6, 6])
        self.assertIn("eval_loss", metrics[-1])
        # --precision=auto
        dtype = "bfloat16" if "avx512" in pathlib.Path("/proc/cpuinfo").read_text() else "float32"
        self.assertEqual(json.loads((self.root / "models/books/config.json").read_text())["torch_dtype"], dtype)

    def train(self, save, ranks, *flags):
        """The losses of its steps, and what it has printed."""
        output = self.run_program(
            ["examples/llama/train"], "--model=/models/qwen", "--data=/data/books.txt", "--seq=32", "--batch=6",
            "--lr=1e-3", "--steps=8", "--save_every=4", "--keep_last=0", "--precision=fp32", "--rows=packed",
            f"--ranks={ranks}", f"--save=/runs/{save}", f"--metrics=/runs/{save}.jsonl",
            f"--export=/models/{save}", *flags)
        lines = (self.root / f"runs/{save}.jsonl").read_text().splitlines()
        return [line["loss"] for line in map(json.loads, lines) if "loss" in line], output

    def test_goes_on_with_the_bits_of_an_unbroken_run(self):
        self.make_model()
        losses, _ = self.train("unbroken", 2)
        self.assertEqual(len(losses), 8)
        flags = ["--model=/models/qwen", "--data=/data/books.txt"]
        self.assertIn("go on from them by --resume",
                      self.run_program(["examples/llama/train"], *flags, "--save=/runs/unbroken", code=2))
        self.assertIn("is there already",
                      self.run_program(["examples/llama/train"], *flags, "--export=/models/unbroken", code=2))
        for ranks in (2, 3):
            save = self.root / f"runs/again_{ranks}"
            save.mkdir()
            (save / ".libtorch_fsdp-checkpoints").touch()
            shutil.copytree(self.root / "runs/unbroken/step-4", save / "step-4")
            again, output = self.train(save.name, ranks, "--resume")
            self.assertIn("goes on after step 4\n", output)
            self.assertEqual(len(again), 4)
            if ranks == 2:
                self.assertEqual(again, losses[4:])
                model = (self.root / "models/again_2/model.safetensors").read_bytes()
                self.assertEqual(model, (self.root / "models/unbroken/model.safetensors").read_bytes())
            for one, other in zip(again, losses[4:]):
                self.assertAlmostEqual(one, other, places=4)


if __name__ == "__main__":
    unittest.main()
