// Makes torch::nn::Sequential run the units among its children through
// fsdp::Forward.
#ifndef FSDP_MODEL_SEQUENTIAL_ADAPTER_H_
#define FSDP_MODEL_SEQUENTIAL_ADAPTER_H_

#include <torch/nn/modules/container/sequential.h>

#include "absl/status/status.h"

namespace fsdp {

enum class AdaptedUnits { kAll, kRecomputed };

// Makes `sequential` run each child that is a unit through fsdp::Forward, or
// only those that Options::recompute.units names; a second call changes
// nothing. at<M>(), ptr() and children() still return the modules themselves. A
// call throws StatusError (FailedPrecondition) if the unit returns something
// else than a tensor, a vector of tensors, a pair or a tuple of two, or what an
// LSTM returns; a module of the user's has to run such a unit by fsdp::Forward.
void AdaptSequential(torch::nn::SequentialImpl& sequential, AdaptedUnits units);

// Internal: this LibTorch does not keep modules as AdaptSequential() needs.
absl::Status CheckSequentialAdapter();

}  // namespace fsdp

#endif  // FSDP_MODEL_SEQUENTIAL_ADAPTER_H_
