#!/usr/bin/env python3
"""Makes a folder of `data` with Megatron-Core's own saving code, on CPUs: `megatron_0_15` or `megatron_0_16`, whichever is
installed. Needs torch 2.11, megatron-core 0.15.3 or 0.16.1, and multi-storage-client.

usage: make_megatron_samples.py [FOLDER]

Two ranks with gloo, tensor-parallel. 0.16: sharded_state_dict() of a GPTModel of two layers (RMSNorm, SwiGLU, grouped
queries), and what optim_state_to_sharding_state() makes of torch's Adam of one parameter. 0.15: tensors made by
ShardedTensor.from_rank_offsets() and, of its distributed optimizer's kind, from_rank_offsets_flat(); and a ShardedObject.
Both are written by dist_checkpointing.save(), through the storage client: as with the torch that these versions came out
with, the plans of all ranks are in `.metadata` then, which torch 2.11's own writer leaves out. What Megatron asks of
CUDA beside tensors is answered for CPUs. Element i, row-major, of the n-th tensor by name is 1000 n + i.
"""

import math
import os
import shutil
import sys
import tempfile

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils import cpp_extension


def no_compiler(*_args, **_options):
    """There is no CUDA to compile for."""
    raise OSError("no CUDA")


def answer_for_cpus():
    """What the code between model and files asks."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    cpp_extension.load_inline = no_compiler
    numpy.product = numpy.prod  # 0.15 is of the time of numpy 1


def fill(state):
    """The values that the tests expect."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    tensors = [tensor for tensor in nested_values(state) if isinstance(tensor, ShardedTensor)]
    names = sorted({tensor.key for tensor in tensors})
    for tensor in tensors:
        numel = math.prod(tensor.global_shape)
        part = 1000 * names.index(tensor.key) + torch.arange(numel, dtype=torch.float32).reshape(tensor.global_shape)
        sizes = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
        for dim, (offset, size) in enumerate(zip(tensor.global_offset, sizes)):
            part = part.narrow(dim, offset, size)
        part = part.reshape(tensor.local_shape)
        if getattr(tensor, "flattened_range", None) is not None:
            part = part.reshape(-1)[tensor.flattened_range]
        tensor.data = part.clone()


def gpt():
    """A model and its optimizer, of 0.16."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import optimizer as sharded_optimizer
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=6,
        tensor_model_parallel_size=2, use_cpu_initialization=True, perform_initialization=False,
        gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm")
    model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=16, max_sequence_length=8,
                     position_embedding_type="rope", share_embeddings_and_output_weights=True)
    sharded = model.sharded_state_dict()
    # Of one parameter, so that the folder stays small.
    trained = [model.decoder.final_layernorm.weight]
    adam = torch.optim.Adam(trained, lr=0.25)
    trained[0].grad = torch.zeros_like(trained[0])
    adam.step()
    state = adam.state_dict()
    by_id = sharded_optimizer.get_param_id_to_sharded_param_map(sharded, trained)
    step = state["state"][0]["step"]
    sharded_optimizer.optim_state_to_sharding_state(state, by_id, exclude_keys="step")
    state["state"]["common_step"] = step
    return {"model": sharded, "optimizer": state, "iteration": 3}


def flattened():
    """Tensors as 0.15 has them, until its distributed optimizer lays them out otherwise."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    rank = dist.get_rank()
    some = slice(0, 7) if rank == 0 else slice(7, 12)
    state = {"column": ShardedTensor.from_rank_offsets("output_layer.weight", torch.empty(3, 4), (0, rank, 2)),
             "some": ShardedTensor.from_rank_offsets_flat(
                 "optimizer.state.exp_avg.norm.weight", torch.empty(some.stop - some.start), (12,),
                 flattened_range=some),
             "all": ShardedTensor.from_rank_offsets_flat(
                 "optimizer.state.exp_avg.output_layer.weight", torch.empty(12), (3, 4), (0, rank, 2),
                 flattened_range=slice(0, 12)),
             "rng": ShardedObject("rng_state", [{"seed": 5, "rank": rank}], (2,), (rank,))}
    for layer in range(2):
        state[f"row{layer}"] = ShardedTensor.from_rank_offsets(
            "decoder.layers.mlp.linear_fc2.weight", torch.empty(4, 3), (0, layer, 2), (2, rank, 2), prepend_axis_num=1)
    return state


def save(rank, folder, make):
    """One of two ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29741")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    answer_for_cpus()
    from megatron.core import dist_checkpointing
    from megatron.core.msc_utils import MultiStorageClientFeature

    MultiStorageClientFeature.enable()
    state = make()
    fill(state)
    dist_checkpointing.save(state, folder)
    dist.destroy_process_group()


def main():
    """Writes the folder."""
    data = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
    answer_for_cpus()
    import megatron.core

    is_new = megatron.core.__version__ >= "0.16"
    target = os.path.join(data, "megatron_0_16" if is_new else "megatron_0_15")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save, (folder, gpt if is_new else flattened), nprocs=2)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    os.chmod(target, 0o755)
    # Globs do not see names that begin with a dot.
    os.rename(os.path.join(target, ".metadata"), os.path.join(target, "metadata"))


if __name__ == "__main__":
    main()
