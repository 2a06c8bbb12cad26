#!/usr/bin/env python3
"""The program //examples/llama:generate: what it prints, from what, and what it refuses.

The programs are this test's runfiles, below the directory that it starts in.
"""
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import unittest

GENERATE, TRAIN = "examples/llama/generate", "examples/llama/train"
RECORDED = pathlib.Path("examples/llama/testing/recorded")
MODELS = ("llama_scaled_rope", "llama_tied", "qwen2", "qwen3")
QWEN3 = RECORDED / "qwen3"
GREEDY = ("--temperature=0", "--max_tokens=16", "--threads=1")
PROMPT = "--tokens=5,6,7"


def read_safetensors(path):
    """The header, and the bytes behind it."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return header, bytearray(file.read())


def write_safetensors(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class GenerateTest(unittest.TestCase):

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def run_program(self, *flags, given=None):
        return subprocess.run([GENERATE, *flags], input=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True)

    def succeed(self, *flags, given=None):
        """Its output, and what it says besides."""
        done = self.run_program(*flags, given=given)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout, done.stderr

    def tokens(self, model, *flags, given=None):
        return [int(line) for line in self.succeed(f"--model={model}", *flags, given=given)[0].splitlines()]

    def refuse(self, text, *flags, code=1, given=None):
        done = self.run_program(*flags, given=given)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(text, done.stderr)
        self.assertEqual(done.stdout, "")

    def copy_of(self, model, name="copy", **changes):
        """A folder of its own, with another config.json."""
        folder = self.folder / name
        shutil.copytree(model, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    def train(self, *flags, code=0):
        text = b"All that glitters is not gold.\n" * 20
        (self.folder / "text.bin").write_bytes(b"".join(byte.to_bytes(2, "little") for byte in text))
        (self.folder / "text.json").write_text(json.dumps({
            "format": "fsdp-tokens", "version": 1, "dtype": "uint16", "num_tokens": len(text), "num_documents": 0,
            "vocab_size": 128, "bos_id": None, "eos_id": None, "tokenizer_sha256": None}))
        done = subprocess.run([TRAIN, f"--model={QWEN3}", f"--data={self.folder}/text.bin", "--seq=16", "--batch=2",
                               "--steps=3", "--lr=0.05", "--warmup=1", "--threads=1", "--precision=fp32", *flags],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode, code, done.stdout)
        return done.stdout

    def test_tokens_are_those_of_transformers(self):
        for model in MODELS:
            recorded = json.loads((RECORDED / model / "recorded.json").read_text())
            for prompt, expected in zip(recorded["tokens"], recorded["generated"]):
                flag = "--tokens=" + ",".join(map(str, prompt))
                self.assertEqual(self.tokens(RECORDED / model, flag, *GREEDY), expected, model)

    def test_a_batch_is_its_prompts_alone(self):
        for model in MODELS:
            recorded = json.loads((RECORDED / model / "recorded.json").read_text())
            prompts = [",".join(map(str, prompt)) for prompt in (*recorded["tokens"], [5], recorded["tokens"][0][:7])]
            output, said = self.succeed(f"--model={RECORDED / model}", "--tokens=-", "--batch", *GREEDY,
                                        given="\n".join(prompts) + "\n")
            lines = [list(map(int, line.split(","))) for line in output.splitlines()]
            self.assertEqual(lines[:2], recorded["generated"], model)
            for prompt, line in zip(prompts[2:], lines[2:]):
                self.assertEqual(self.tokens(RECORDED / model, f"--tokens={prompt}", *GREEDY), line, model)
            self.assertEqual(len(lines), 4)
            self.assertRegex(said, r"prompt: 40 tokens in .*\nthen: 60 tokens in .*\n4 ended by --max_tokens\n")

    def test_reads_tokens_from_standard_input(self):
        expected = self.tokens(QWEN3, PROMPT, *GREEDY)
        for given in ("5 6 7", "5,6,\n7\n", "5\n6\n7\n"):
            self.assertEqual(self.tokens(QWEN3, "--tokens=-", *GREEDY, given=given), expected)

    def test_seeds_and_limits_decide_what_is_drawn(self):
        flags = (PROMPT, "--max_tokens=30", "--threads=1", "--temperature=2")
        one = self.tokens(QWEN3, *flags, "--seed=1")
        self.assertEqual(len(one), 30)
        self.assertEqual(self.tokens(QWEN3, *flags, "--seed=1"), one)
        self.assertNotEqual(self.tokens(QWEN3, *flags, "--seed=2"), one)
        likeliest = self.tokens(QWEN3, PROMPT, *GREEDY)
        for limit in ("--top_k=1", "--top_p=0.0001"):
            self.assertEqual(self.tokens(QWEN3, *flags, limit)[:16], likeliest)

    def test_bfloat16(self):
        self.assertEqual(len(self.tokens(QWEN3, PROMPT, "--precision=bf16", *GREEDY)), 16)

    def test_bytes_are_text(self):
        done = subprocess.run([GENERATE, f"--model={QWEN3}", "--prompt=Hello", *GREEDY], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
        expected = self.tokens(QWEN3, "--tokens=" + ",".join(str(byte) for byte in b"Hello"), *GREEDY)
        self.assertEqual(done.stdout, bytes(expected) + b"\n")
        said = done.stderr.decode()
        self.assertRegex(said, r"prompt: 5 tokens in [\d.]+ s \([\de.+]+ tokens/s\)")
        self.assertRegex(said, r"then: 15 tokens in [\d.]+ s \([\de.+]+ tokens/s\)\nended by --max_tokens")

    def test_ends_where_the_model_does(self):
        all_tokens = self.tokens(QWEN3, PROMPT, *GREEDY)
        ends = self.copy_of(QWEN3, "ends", eos_token_id=all_tokens[3])
        self.assertEqual(self.tokens(ends, PROMPT, *GREEDY), all_tokens[:all_tokens.index(all_tokens[3]) + 1])
        self.assertIn("ended by eos_token_id", self.succeed(f"--model={ends}", PROMPT, *GREEDY)[1])
        # As transformers does, it goes by what is beside config.json.
        (ends / "generation_config.json").write_text(json.dumps({"eos_token_id": [127, all_tokens[1]]}))
        self.assertEqual(self.tokens(ends, PROMPT, *GREEDY), all_tokens[:all_tokens.index(all_tokens[1]) + 1])
        (ends / "generation_config.json").write_text('{"eos_token_id": -1}')
        self.refuse("generation_config.json: eos_token_id", f"--model={ends}", PROMPT)
        short = self.copy_of(QWEN3, "short", max_position_embeddings=8)
        self.assertEqual(self.tokens(short, PROMPT, *GREEDY), all_tokens[:5])
        _, said = self.succeed(f"--model={short}", PROMPT, *GREEDY)
        self.assertIn("ended by the model's max_position_embeddings", said)
        self.refuse("the prompt has 8 tokens, and the model's max_position_embeddings is 8", f"--model={short}",
                    "--tokens=1,2,3,4,5,6,7,8")

    def test_goes_on_from_checkpoints(self):
        saved, exported = self.folder / "saved", self.folder / "exported"
        self.train(f"--save={saved}", f"--export={exported}")
        expected = self.tokens(exported, PROMPT, *GREEDY)
        self.assertEqual(self.tokens(saved / "step-3", PROMPT, *GREEDY), expected)
        self.assertNotEqual(self.tokens(QWEN3, PROMPT, *GREEDY), expected)
        weights = bytearray((saved / "step-3" / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (saved / "step-3" / "model.safetensors").write_bytes(weights)
        self.refuse("CRC32C", f"--model={saved}/step-3", PROMPT)

    def test_a_checkpoint_of_adapters_has_them_alone(self):
        saved, whole, exported = self.folder / "saved", self.folder / "whole", self.folder / "exported"
        lora = ("--lora_rank=4", "--lora_targets=q_proj,down_proj", "--seed=5")
        self.train(f"--save={whole}", f"--export={exported}", *lora, "--steps=6")
        self.train(f"--save={saved}", *lora, "--steps=6", "--save_every=3")
        names, _ = read_safetensors(saved / "step-6" / "model.safetensors")
        self.assertTrue(all(".lora_" in name for name in names if name != "__metadata__"), names)
        self.assertLess((saved / "step-6" / "model.safetensors").stat().st_size * 4,
                        (QWEN3 / "model.safetensors").stat().st_size)
        expected = self.tokens(exported, PROMPT, *GREEDY)
        self.assertEqual(self.tokens(saved / "step-6", PROMPT, *GREEDY), expected)
        self.assertEqual(self.tokens(QWEN3, f"--adapter={saved}/step-6", PROMPT, *GREEDY), expected)
        self.refuse("step-6, a checkpoint of adapters: leave --adapter away", f"--model={saved}/step-6",
                    f"--adapter={saved}/step-3", PROMPT)
        self.assertIn(f"{saved}/step-6 has adapters alone: name it by --adapter",
                      self.train(f"--model={saved}/step-6", code=2))
        shutil.rmtree(saved / "step-6")
        self.assertIn("goes on after step 3", self.train(f"--save={saved}", "--resume", *lora, "--steps=6"))
        self.assertEqual((saved / "step-6" / "model.safetensors").read_bytes(),
                         (whole / "step-6" / "model.safetensors").read_bytes())

    def test_merges_adapters(self):
        adapter, exported = self.folder / "adapter", self.folder / "exported"
        self.train("--lora_rank=4", f"--save_adapter={adapter}", f"--export={exported}")
        merged = self.tokens(QWEN3, f"--adapter={adapter}", PROMPT, *GREEDY)
        self.assertEqual(merged, self.tokens(exported, PROMPT, *GREEDY))
        self.assertNotEqual(merged, self.tokens(QWEN3, PROMPT, *GREEDY))

    def test_merges_an_adapter_of_the_head(self):
        adapter, exported = self.folder / "adapter", self.folder / "exported"
        self.train("--lora_rank=4", "--lora_targets=q_proj", f"--save_adapter={adapter}", f"--export={exported}")
        before = self.tokens(exported, PROMPT, *GREEDY)
        # A row of A is 0.25, the first token's of B has a 2, and 16 / 4 scales both: each weight of that token gets 2.
        header, data = read_safetensors(adapter / "adapter_model.safetensors")
        for name, shape, first, ones in (("A", [4, 32], 0, (0.25,) * 32), ("B", [128, 4], 4 * before[0], (2.0,))):
            values = [0.0] * (shape[0] * shape[1])
            values[first:first + len(ones)] = ones
            header[f"base_model.model.lm_head.lora_{name}.weight"] = {
                "dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(values)]}
            data += struct.pack(f"<{len(values)}f", *values)
        write_safetensors(adapter / "adapter_model.safetensors", header, data)
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["target_modules"] = ["q_proj", "lm_head"]
        (adapter / "adapter_config.json").write_text(json.dumps(config))

        header, data = read_safetensors(exported / "model.safetensors")
        row = header["lm_head.weight"]["data_offsets"][0] + 4 * 32 * before[0]
        data[row:row + 128] = struct.pack("<32f", *(value + 2 for value in struct.unpack("<32f", data[row:row + 128])))
        write_safetensors(exported / "model.safetensors", header, data)
        expected = self.tokens(exported, PROMPT, *GREEDY)
        self.assertNotEqual(expected, before)
        self.assertEqual(self.tokens(QWEN3, f"--adapter={adapter}", PROMPT, *GREEDY), expected)

    def test_an_int8_base_with_its_adapters(self):
        adapter, exported = self.folder / "adapter", self.folder / "exported"
        self.train("--lora_rank=4", "--base=int8", f"--save_adapter={adapter}", f"--export={exported}")
        merged = self.tokens(QWEN3, f"--adapter={adapter}", PROMPT, *GREEDY)
        self.assertEqual(merged, self.tokens(exported, PROMPT, *GREEDY))
        int8 = self.tokens(QWEN3, "--base=int8", f"--adapter={adapter}", PROMPT, *GREEDY)
        self.assertEqual(int8[0], merged[0])
        self.assertEqual(len(self.tokens(QWEN3, "--base=int8", PROMPT, *GREEDY)), 16)

    def test_an_adapter_of_the_head_is_refused_where_it_would_not_count(self):
        adapter, targets = self.folder / "adapter", "--lora_targets=q_proj,lm_head"
        self.assertIn("an adapter of lm_head", self.train("--lora_rank=4", targets, code=2))
        self.train("--lora_rank=4", f"--save_adapter={adapter}")
        config = json.loads((adapter / "adapter_config.json").read_text())
        config["target_modules"] = ["q_proj", "lm_head"]
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        self.refuse("an adapter of lm_head", f"--model={QWEN3}", "--base=int8", f"--adapter={adapter}", PROMPT)

    def test_options_of_an_int8_base_are_chosen_once(self):
        adapter, exported = self.folder / "adapter", self.folder / "exported"
        # What is merged at the end may need more than what was trained was chosen for.
        said = self.train("--lora_rank=4", "--base=int8", f"--save_adapter={adapter}", f"--export={exported}",
                          "--auto", "--auto_memory=1")
        self.assertEqual(said.count(" of 1024.00 MiB"), 1, said)
        merged = self.tokens(QWEN3, f"--adapter={adapter}", PROMPT, *GREEDY)
        self.assertEqual(merged, self.tokens(exported, PROMPT, *GREEDY))

    def test_says_what_is_wrong_with_a_model(self):
        self.refuse("there is no nowhere/config.json", "--model=nowhere", PROMPT)
        self.refuse("no-adapter", f"--model={QWEN3}", "--adapter=no-adapter", PROMPT)
        broken = self.copy_of(QWEN3, "broken")
        (broken / "config.json").write_text("")
        self.refuse("broken/config.json: JSON, byte 0: ", f"--model={broken}", PROMPT)
        huge = self.copy_of(QWEN3, "huge", num_hidden_layers=1000000000)
        self.refuse("huge/config.json: its sizes make a model of at least", f"--model={huge}", PROMPT)
        self.assertIn("huge/config.json: its sizes", self.train(f"--model={huge}", code=2))
        empty = self.copy_of(QWEN3)
        (empty / "model.safetensors").unlink()
        self.refuse(str(empty), f"--model={empty}", PROMPT)

    def test_a_tied_head_may_be_there_once_more(self):
        tied = RECORDED / "llama_tied"
        expected = self.tokens(tied, PROMPT, *GREEDY)
        with open(tied / "model.safetensors", "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = file.read()
        first, last = header["model.embed_tokens.weight"]["data_offsets"]
        embed = data[first:last]
        for name, head in (("same", embed), ("other", embed[:-4] + b"\0\0\0\0")):
            model = self.copy_of(tied, name)
            (model / "model.safetensors").unlink()
            place = {"data_offsets": [len(data), len(data) + len(head)]}
            text = json.dumps({**header, "lm_head.weight": {**header["model.embed_tokens.weight"], **place}}).encode()
            (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data + head)
            if name == "same":
                self.assertEqual(self.tokens(model, PROMPT, *GREEDY), expected)
                self.train(f"--model={model}", "--lora_rank=2")
            else:
                said = "lm_head.weight differs from model.embed_tokens.weight"
                self.refuse(said, f"--model={model}", PROMPT)
                said = self.train(f"--model={model}", code=2)
                self.assertIn("by setting tie_word_embeddings to false in config.json", said)
        alone = self.copy_of(tied, "alone")
        (alone / "model.safetensors").unlink()
        text = json.dumps({name.replace("model.embed_tokens", "lm_head"): value for name, value in header.items()}).encode()
        (alone / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
        self.assertEqual(self.tokens(alone, PROMPT, *GREEDY), expected)
        self.train(f"--model={alone}", "--lora_rank=2")

    def test_waits_for_no_fifo(self):
        for name in ("config.json", "model.safetensors", "tokenizer_config.json"):
            model = self.copy_of(QWEN3, "with_" + name)
            (model / name).unlink(missing_ok=True)
            os.mkfifo(model / name)
            text = f"{model}/{name}: it is no regular file"
            if name != "tokenizer_config.json":
                self.refuse(text, f"--model={model}", PROMPT)
            self.assertIn(text, self.train(f"--model={model}", code=2))
        os.mkfifo(self.folder / "adapter_config.json")
        self.refuse("is no regular file", f"--model={QWEN3}", f"--adapter={self.folder}", PROMPT)

    def test_carries_what_is_beside_the_weights(self):
        files = {"tokenizer.model": b"\0\xff", "LICENSE": b"free\n", "README.md": b"", "chat_template.json": b"{}",
                 "preprocessor_config.json": b"{}"}
        others = ("pytorch_model.bin", "model.safetensors.index.json.bak.index.json", "adapter_config.json", ".hidden")
        model, exported, saved = self.copy_of(QWEN3), self.folder / "exported", self.folder / "saved"
        for name in (*files, *others):
            (model / name).write_bytes(files.get(name, b"{}"))
        (model / "original").mkdir()
        self.train(f"--model={model}", f"--export={exported}", f"--save={saved}")
        for folder in (exported, saved / "step-3"):
            for name, content in files.items():
                self.assertEqual((folder / name).read_bytes(), content, name)
            for name in (*others, "original"):
                self.assertFalse((folder / name).exists(), name)

    def test_says_what_is_wrong_with_a_prompt(self):
        model = f"--model={QWEN3}"
        self.refuse("token 128 of the prompt is outside of the model's vocabulary of 128", model, "--tokens=1,128")
        self.refuse("token 195 of the prompt", model, "--prompt=ö")
        self.refuse("token -1 of the prompt", model, "--tokens=-1")
        self.refuse('"x" is no token', model, "--tokens=1,x")
        self.refuse("the prompt is empty", model, "--tokens=-", given=" \n")
        self.refuse("prompt 2: the prompt is empty", model, "--tokens=-", "--batch", given="1,2\n\n3\n")
        with_tokenizer = self.copy_of(QWEN3)
        (with_tokenizer / "tokenizer.json").write_text("{}")
        self.refuse("--encode TEXT --tokenizer", f"--model={with_tokenizer}", "--prompt=Hello")

    def test_says_what_is_wrong_with_flags(self):
        model = f"--model={QWEN3}"
        self.refuse("--model=DIR", PROMPT, code=2)
        self.refuse("--prompt=TEXT", model, code=2)
        self.refuse("--batch takes its prompts from standard input", model, PROMPT, "--batch", code=2)
        self.refuse("either by --prompt=TEXT", model, PROMPT, "--prompt=p", code=2)
        for flag, said in (("--max_tokens=0", ": expected 1 to"), ("--threads=-1", ": expected 0 to"),
                           ("--temperature=-1", ""), ("--temperature=inf", ""), ("--top_k=-1", ""), ("--top_p=0", ""),
                           ("--top_p=1.5", ""), ("--top_p=nan", ""),
                           ("--precision=fp8", ": expected one of auto, bf16, fp32"),
                           ("--base=int4", ": expected one of int8, precision"),
                           ("--device=tpu", ": expected one of cpu, cuda")):
            self.refuse(flag + said, model, PROMPT, flag, code=2)
        self.refuse("what is 5?", model, PROMPT, "5", code=2)

    def test_help_names_every_flag_of_ours(self):
        text = self.succeed("--help")[0]
        flags = set(re.findall(r"^ +--(\w+) ", text, re.MULTILINE))
        self.assertEqual(flags, {"model", "adapter", "prompt", "tokens", "batch", "max_tokens", "temperature", "top_k",
                                 "top_p", "seed", "precision", "device", "base", "threads"})
        self.assertIn("in one process", text)
        self.assertIn("  generate --model=DIR", text)


if __name__ == "__main__":
    unittest.main()
