// What a user may choose about a sharded model.
#ifndef FSDP_OPTIONS_H_
#define FSDP_OPTIONS_H_

#include "absl/time/time.h"
#include "fsdp/wrap_policy.h"

namespace fsdp {

// The same on all ranks. The defaults are ZeRO stage 3.
struct Options {
  // Units besides the root, which owns what no other unit does. Without a
  // policy the whole model is one unit, and nothing is saved while it computes.
  WrapPolicy wrap_policy;

  // Free a unit's full parameters between its forward and its backward. False
  // saves an all-gather per step and costs the unit's memory.
  bool reshard_after_forward = true;
  // The same for the root, which backward needs first.
  bool reshard_root_after_forward = false;

  // Start the next unit's all-gather while this one computes.
  bool forward_prefetch = true;
  bool backward_prefetch = true;

  // Start from rank 0's parameters. Without it, every rank's own values are
  // kept, which is right only where all ranks have the same.
  bool broadcast_parameters = true;

  // Abort the communicator when a forward or Backward() fails half-way, so
  // that the peers end at once instead of waiting. False where all ranks fail
  // alike and go on, with an input that all refuse for example.
  bool abort_on_failure = true;

  // Sharding a model whose every parameter something else refers to is refused:
  // that is usually an optimizer, which would go on without training anything.
  bool allow_outside_references = false;

  // Longest wait for a collective; zero is the communicator's own default.
  absl::Duration timeout = absl::ZeroDuration();
};

}  // namespace fsdp

#endif  // FSDP_OPTIONS_H_
