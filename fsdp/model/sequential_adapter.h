// Makes torch::nn::Sequential run the units among its children through
// fsdp::Forward.
#ifndef FSDP_MODEL_SEQUENTIAL_ADAPTER_H_
#define FSDP_MODEL_SEQUENTIAL_ADAPTER_H_

#include <torch/nn/modules/container/sequential.h>

#include "absl/status/status.h"

namespace fsdp {

enum class AdaptedUnits { kAll, kRecomputed };

// Replaces what `sequential` calls for each child that is a unit, once, or only
// for those that Options::recompute.units has chosen. To
// everybody else the list is as before: at<M>(), ptr() and children() give the
// modules themselves. A call throws StatusError (FailedPrecondition) where the
// unit returns something else than a tensor, a vector of them, a pair or a
// tuple of two, or what an LSTM returns: such a unit is run by fsdp::Forward
// from a module of the user's.
void AdaptSequential(torch::nn::SequentialImpl& sequential, AdaptedUnits units);

// Internal when this LibTorch does not keep modules as AdaptSequential() needs.
absl::Status CheckSequentialAdapter();

}  // namespace fsdp

#endif  // FSDP_MODEL_SEQUENTIAL_ADAPTER_H_
