"""A Llama of random weights and tokens for it, in files that //examples/llama and transformers read alike."""
import array
import json
import math
import pathlib
import random
import struct

SIGNS = bytes(0x3c | byte & 0x80 for byte in range(256))
ONE = b"\x80\x3f"
PIECE = 1 << 22  # numbers that are drawn at a time


def shapes(config):
    """(name, shape) of each weight."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    keys = hidden // heads * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (keys, hidden)),
                            ("self_attn.v_proj", (keys, hidden)), ("self_attn.o_proj", (hidden, hidden)),
                            ("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)),
                            ("mlp.down_proj", (hidden, inner)), ("input_layernorm", (hidden,)),
                            ("post_attention_layernorm", (hidden,))):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def numbers(count, source):
    """bfloat16 of either sign from 2^-7 to 2^-5, whose standard deviation is 0.019."""
    drawn = bytearray(source.randbytes(2 * count))
    drawn[1::2] = drawn[1::2].translate(SIGNS)
    return drawn


def write_weights(path, config):
    """Matrices of numbers(), norms of 1, in bfloat16; always the same."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes(config):
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    source = random.Random(1)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, shape in shapes(config):
            left = math.prod(shape)
            if len(shape) == 1:
                file.write(ONE * left)
                continue
            while left > 0:
                file.write(numbers(min(left, PIECE), source))
                left -= PIECE


def write_tokens(path, vocab, count):
    """PATH.bin and, last, PATH.json: see examples/llama/data/README.md."""
    source = random.Random(2)
    with open(f"{path}.bin", "wb") as file:
        array.array("I", (source.randrange(vocab) for _ in range(count))).tofile(file)
    pathlib.Path(f"{path}.json").write_text(json.dumps({
        "format": "fsdp-tokens", "version": 1, "dtype": "uint32", "num_tokens": count, "num_documents": 0,
        "vocab_size": vocab, "bos_id": None, "eos_id": None, "tokenizer_sha256": None}))


def write(folder, config, rows, seq, weights):
    """The model's folder, without `weights` of config.json alone, and tokens for one batch beside it; once."""
    if pathlib.Path(f"{folder}.json").exists():
        return
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    if weights:
        write_weights(pathlib.Path(folder) / "model.safetensors", config)
    write_tokens(folder, config["vocab_size"], rows * seq + 1)
