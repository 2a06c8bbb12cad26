#!/usr/bin/env python3
"""Makes the folders of `recorded`: tiny random models of Hugging Face's transformers, and what they compute.

usage: record_models.py [FOLDER]

Needs torch, transformers and safetensors; `recorded` is of torch 2.11.0, transformers 5.24.0. Each model has a folder:

  config.json, model.safetensors  the model, as save_pretrained() writes it
  recorded.safetensors            "logits" of "tokens" [batch, tokens], float32, and "bfloat16_logits", those of the model
                                  in bfloat16
  recorded.json                   "tokens"; "loss", the mean over all tokens but the first of each row; "gradients", the
                                  2-norm of its gradient by parameter; "generated", 16 tokens behind each row, greedily

rope_types.json has the rotary tables of small configurations of each type; rope.json has inverse frequencies for the configurations of models that are in use.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import (AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen3Config, Qwen3ForCausalLM)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

BATCH, TOKENS, GENERATED = 2, 16, 16
PAD = 3
SIZES = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
# At wavelengths of 6, 63, 628 and 6283 tokens: one as it was, one between, two scaled.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 0.75, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
MODELS = {
    "llama_scaled_rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3, rms_norm_eps=1e-5,
                                                        attention_bias=True, mlp_bias=True)),
    # The gradient of the padding token's embedding, which some of the tokens are, is only that of the head.
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True, pad_token_id=PAD)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, rope_parameters={"rope_type": "default",
                                                                     "rope_theta": 1000000.0})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, pad_token_id=PAD,
                                            rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
}
# Of the models that are in use: Llama 2, 3, 3.1 and 3.2, Qwen3.
ROPES = [
    {"head_dim": 128, "rope_theta": 10000.0},
    {"head_dim": 128, "rope_theta": 500000.0},
    {"head_dim": 128, "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"head_dim": 64, "rope_theta": 500000.0, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"head_dim": 128, "rope_theta": 1000000.0},
]


# With 64 positions and heads of 16 elements.
ROPE_TYPES = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, "rope_theta": 100.0},
]


def make(model_class, config):
    """With values in which a layer that is left out shows."""
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_((0.5 if name.endswith("bias") else 0.3) * noise)
    return model


def record(folder, model_class, config):
    model = make(model_class, config)
    model.save_pretrained(folder)
    tokens = torch.randint(4, config.vocab_size, (BATCH, TOKENS))
    tokens[0, 5] = tokens[1, 11] = PAD
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        bfloat16_logits = rounded(input_ids=tokens).logits
        generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                                   max_new_tokens=GENERATED, pad_token_id=0)[:, TOKENS:]
    assert generated.shape == (BATCH, GENERATED)
    save_file({"logits": output.logits.detach().contiguous(), "bfloat16_logits": bfloat16_logits.contiguous()},
              os.path.join(folder, "recorded.safetensors"))
    write(os.path.join(folder, "recorded.json"), {
        "tokens": tokens.tolist(),
        "loss": output.loss.item(),
        "gradients": {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()},
        "generated": generated.tolist(),
    })
    # Of generation, which tests do without.
    os.remove(os.path.join(folder, "generation_config.json"))


def rope_of(given):
    parameters = {"rope_type": "default", **{key: value for key, value in given.items() if key != "head_dim"}}
    config = LlamaConfig(**{**SIZES, "head_dim": given["head_dim"]}, rope_parameters=parameters)
    return {**given, "inverse_frequencies": LlamaRotaryEmbedding(config).inv_freq.tolist()}


def tables_of(parameters, positions):
    config = LlamaConfig(**{**SIZES, "head_dim": 16, "max_position_embeddings": 64}, rope_parameters=dict(parameters))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([positions]))
    return {"rope_parameters": parameters, "positions": positions, "cos": cos[0].tolist(), "sin": sin[0].tolist()}


def write(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.write("\n")


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.realpath(__file__)), "recorded")
    for seed, (name, (model_class, config)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        record(os.path.join(folder, name), model_class, config)
    write(os.path.join(folder, "rope.json"), [rope_of(given) for given in ROPES])
    write(os.path.join(folder, "rope_types.json"),
          [tables_of({"rope_theta": 10000.0, **given}, positions) for given in ROPE_TYPES
           for positions in ([0, 3, 63], [1, 200])])


if __name__ == "__main__":
    main()
