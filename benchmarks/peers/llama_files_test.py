#!/usr/bin/env python3
import json
import math
import pathlib
import struct
import tempfile
import unittest

import llama_files

CONFIG = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "tie_word_embeddings": False}


class LlamaFilesTest(unittest.TestCase):

    def test_weights_and_tokens(self):
        with tempfile.TemporaryDirectory() as scratch:
            for tied in (False, True):
                folder = pathlib.Path(scratch) / str(tied)
                llama_files.write(folder, {**CONFIG, "tie_word_embeddings": tied}, rows=2, seq=3, weights=True)
                file = (folder / "model.safetensors").read_bytes()
                end = 8 + struct.unpack("<Q", file[:8])[0]
                header, data, end = json.loads(file[8:end]), file[end:], 0
                self.assertEqual(header.pop("__metadata__"), {"format": "pt"})
                self.assertEqual((len(header), "lm_head.weight" in header), (20 + (not tied), not tied))
                self.assertEqual(header["model.layers.1.self_attn.k_proj.weight"]["shape"], [8, 16])
                for name, entry in header.items():
                    begin, end = end, end + 2 * math.prod(entry["shape"])
                    self.assertEqual((entry["dtype"], entry["data_offsets"]), ("BF16", [begin, end]), name)
                    values = [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(begin, end, 2)]
                    least, most = (1, 1) if "norm" in name else (2**-7, 2**-5)
                    self.assertTrue(all(least <= abs(value) <= most for value in values), name)
                self.assertEqual(len(data), end)
                tokens = struct.unpack("<7I", pathlib.Path(f"{folder}.bin").read_bytes())
                self.assertLess(max(tokens), 40)
                self.assertEqual(json.loads(pathlib.Path(f"{folder}.json").read_text())["num_tokens"], 7)


if __name__ == "__main__":
    unittest.main()
