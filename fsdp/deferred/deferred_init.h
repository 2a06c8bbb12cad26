// Models larger than memory: modules that are constructed without memory and
// get their values unit by unit when they are sharded.
//
//   std::shared_ptr<Net> net;
//   {
//     fsdp::DeferredInit deferred;
//     net = std::make_shared<Net>(config);  // any module, its code unchanged
//   }
//   auto model = fsdp::FullyShard(net, ranks, options);
#ifndef FSDP_DEFERRED_DEFERRED_INIT_H_
#define FSDP_DEFERRED_DEFERRED_INIT_H_

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/module.h>

#include <cstdint>

#include "absl/status/status.h"

namespace fsdp {

struct DeferredInitOptions {
  // Smaller tensors are made at once: constructors read and write them.
  int64_t min_bytes = 64 << 10;
};

// As long as one lives, tensors that this thread makes are deferred: they have
// sizes, dtype, device and views, but no memory, and what operators do to them
// is recorded. A module made so has the values that its constructor gives it,
// at the latest when FullyShard() reads them, unit by unit; with
// Options::init.broadcast on rank 0 only.
//
// Random values are not those of an ordinary construction, but as random: each
// random operator draws a seed of its own from the default generator, so that
// they depend on torch::manual_seed() alone, and neither on the number of ranks
// nor on the order in which units are sharded.
//
// An operator that needs values, such as item(), gets them. Reading or writing
// a deferred tensor by pointer or outside a scope throws (FailedPrecondition
// for TorchToStatus()).
class DeferredInit {
 public:
  explicit DeferredInit(
      const DeferredInitOptions& options = DeferredInitOptions());
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;
  ~DeferredInit();

  // Whether this thread is in a scope.
  static bool IsActive();

 private:
  const int64_t outer_min_bytes_;
  const c10::impl::IncludeDispatchKeyGuard records_;
};

// Within a DeferredInit: makes ordinary tensors.
class EagerInit {
 public:
  EagerInit() : unrecorded_(c10::DispatchKey::DeferredInit) {}
  EagerInit(const EagerInit&) = delete;
  EagerInit& operator=(const EagerInit&) = delete;
  // Not trivial, so that a scope is not an unused variable.
  ~EagerInit() {}  // NOLINT(modernize-use-equals-default)

 private:
  const c10::impl::ExcludeDispatchKeyGuard unrecorded_;
};

// Gives all deferred parameters and buffers of `module` their values; tensors
// keep their identity and ties. For use without sharding.
absl::Status Materialize(torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_DEFERRED_DEFERRED_INIT_H_
