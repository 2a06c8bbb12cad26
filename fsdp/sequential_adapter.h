// Makes torch::nn::Sequential run the units among its children through
// fsdp::Forward.
#ifndef FSDP_SEQUENTIAL_ADAPTER_H_
#define FSDP_SEQUENTIAL_ADAPTER_H_

#include <torch/nn/modules/container/sequential.h>

namespace fsdp {

// Replaces what `sequential` calls for each child that is a unit; the children
// stay registered as they are, under their names. The replacement takes and
// returns one tensor: a unit with another signature raises AnyModule's error
// when called, and is run by fsdp::Forward from a module of the user's instead.
void AdaptSequential(torch::nn::SequentialImpl& sequential);

}  // namespace fsdp

#endif  // FSDP_SEQUENTIAL_ADAPTER_H_
