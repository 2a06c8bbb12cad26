#!/usr/bin/env python3
import array
import json
import math
import pathlib
import random
import struct
import tempfile
import unittest

import llama_files

CONFIG = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "tie_word_embeddings": False}


class LlamaFilesTest(unittest.TestCase):

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name) / "model"

    def write(self, name="model", **changes):
        folder = self.folder.with_name(name)
        llama_files.write(folder, {**CONFIG, **changes}, rows=2, seq=3, weights=True)
        file = (folder / "model.safetensors").read_bytes()
        end = 8 + struct.unpack("<Q", file[:8])[0]
        header = json.loads(file[8:end])
        self.assertEqual((end % 8, header.pop("__metadata__")), (0, {"format": "pt"}))
        return header, file[end:]

    def test_weights_fill_the_file(self):
        header, data = self.write()
        end = 0
        for name, entry in header.items():
            begin, end = end, end + 2 * math.prod(entry["shape"])
            self.assertEqual((entry["dtype"], entry["data_offsets"]), ("BF16", [begin, end]), name)
            self.assertEqual(data[begin:end] == llama_files.ONE * ((end - begin) // 2), "norm" in name, name)
        self.assertEqual((len(header), len(data)), (2 * 9 + 3, end))
        self.assertEqual(header["model.layers.1.self_attn.k_proj.weight"]["shape"], [8, 16])
        self.assertNotIn("lm_head.weight", self.write("tied", tie_word_embeddings=True)[0])

    def test_numbers_are_small_and_of_both_signs(self):
        drawn = llama_files.numbers(1000, random.Random(0))
        values = [struct.unpack("<f", b"\0\0" + drawn[i:i + 2])[0] for i in range(0, 2000, 2)]
        self.assertTrue(all(2**-7 <= abs(value) < 2**-5 for value in values))
        self.assertAlmostEqual(sum(value * value for value in values) / 1000, 3.56e-4, delta=3e-5)
        self.assertLess(abs(sum(values) / 1000), 0.002)

    def test_tokens_are_one_batch_and_are_written_once(self):
        self.write()
        tokens = array.array("I", pathlib.Path(f"{self.folder}.bin").read_bytes())
        self.assertEqual((len(tokens), max(tokens) < 40), (7, True))
        self.assertEqual(json.loads(pathlib.Path(f"{self.folder}.json").read_text())["num_tokens"], 7)
        (self.folder / "model.safetensors").unlink()
        llama_files.write(self.folder, CONFIG, rows=2, seq=3, weights=True)
        self.assertFalse((self.folder / "model.safetensors").exists())


if __name__ == "__main__":
    unittest.main()
