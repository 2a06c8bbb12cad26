// Models larger than memory: a module is constructed without memory, and
// FullyShard() gives it its values unit by unit.
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

// Options of a DeferredInit.
struct DeferredInitOptions {
  // Smaller tensors get memory at once, because constructors read and write
  // them.
  int64_t min_bytes = 64 << 10;
};

// While a DeferredInit lives, the tensors that this thread makes are deferred:
// they have sizes, dtype, device and views, but no memory, and what operators
// do to them is recorded. FullyShard() runs the records unit by unit, so that
// each unit has the values that its constructor gives it; with
// Options::init.broadcast only rank 0 runs them.
//
// Random values differ from those of an ordinary construction, but are as
// random. Each random operator draws a seed from the default generator, so the
// values depend on torch::manual_seed() alone, and neither on the number of
// ranks nor on the order in which units are sharded.
//
// An operator that needs values, such as item(), gets them. It is an error to
// read or write a deferred tensor by pointer or outside a scope: LibTorch
// throws, and TorchToStatus() returns FailedPrecondition.
class DeferredInit {
 public:
  explicit DeferredInit(
      const DeferredInitOptions& options = DeferredInitOptions());
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;
  ~DeferredInit();

  // Returns whether this thread is in a scope.
  static bool IsActive();

 private:
  const int64_t outer_min_bytes_;
  const c10::impl::IncludeDispatchKeyGuard records_;
};

// Makes ordinary tensors within a DeferredInit.
class EagerInit {
 public:
  EagerInit() : unrecorded_(c10::DispatchKey::DeferredInit) {}
  EagerInit(const EagerInit&) = delete;
  EagerInit& operator=(const EagerInit&) = delete;
  // It is not trivial, so that a scope is not an unused variable.
  ~EagerInit() {}  // NOLINT(modernize-use-equals-default)

 private:
  const c10::impl::ExcludeDispatchKeyGuard unrecorded_;
};

// Gives all deferred parameters and buffers of `module` their values. Tensors
// keep their identity and ties. It is for use without sharding.
absl::Status Materialize(torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_DEFERRED_DEFERRED_INIT_H_
