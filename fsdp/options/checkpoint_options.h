// How a checkpointed region keeps what backward computes with again.
#ifndef FSDP_OPTIONS_CHECKPOINT_OPTIONS_H_
#define FSDP_OPTIONS_CHECKPOINT_OPTIONS_H_

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace fsdp {

class ActivationOffload;

struct CheckpointOptions {
  // Compute with the same random numbers the second time: those of the default
  // generators of the CPU and of the devices of tensor arguments. Costs a copy
  // of the generators' states per region.
  bool preserve_rng_state = true;

  // Give buffers the values that they had before the function ran a second
  // time, so that BatchNorm counts a batch once. Found are those of the sharded
  // model whose units run around the region or inside it, and of `modules`:
  // name there what else the function changes. Costs a copy of them while it
  // runs.
  bool restore_buffers = true;
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};

  // Where arguments are between forward and backward (see
  // activation_offload.h); null: they stay in memory. One for all regions of a
  // rank. A graph keeps it alive.
  std::shared_ptr<ActivationOffload> offload;
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_CHECKPOINT_OPTIONS_H_
