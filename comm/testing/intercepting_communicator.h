// A base class for communicators that do the same with every collective.
#ifndef COMM_TESTING_INTERCEPTING_COMMUNICATOR_H_
#define COMM_TESTING_INTERCEPTING_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm {

class InterceptingCommunicator : public ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

 protected:
  using Pass = absl::FunctionRef<StartedWork()>;

  // Called for each collective, which pass() starts in base(). `whole` is the
  // tensor that has the data of all ranks.
  virtual StartedWork Intercept(Collective collective, absl::string_view label,
                                const at::Tensor& whole, Pass pass) = 0;

  StartedWork DoAllGather(const at::Tensor& out, const at::Tensor& in,
                          absl::string_view label) override {
    return Intercept(Collective::kAllGather, label, out,
                     [&] { return base().AllGather(out, in, label); });
  }
  StartedWork DoReduceScatter(const at::Tensor& out, const at::Tensor& in,
                              ReduceOp op, absl::string_view label) override {
    return Intercept(Collective::kReduceScatter, label, in,
                     [&] { return base().ReduceScatter(out, in, op, label); });
  }
  StartedWork DoAllToAll(const at::Tensor& out, const at::Tensor& in,
                         absl::string_view label) override {
    return Intercept(Collective::kAllToAll, label, in,
                     [&] { return base().AllToAll(out, in, label); });
  }
  StartedWork DoAllReduce(const at::Tensor& tensor, ReduceOp op,
                          absl::string_view label) override {
    return Intercept(Collective::kAllReduce, label, tensor,
                     [&] { return base().AllReduce(tensor, op, label); });
  }
  StartedWork DoBroadcast(const at::Tensor& tensor, int root,
                          absl::string_view label) override {
    return Intercept(Collective::kBroadcast, label, tensor,
                     [&] { return base().Broadcast(tensor, root, label); });
  }
};

}  // namespace fsdp::comm

#endif  // COMM_TESTING_INTERCEPTING_COMMUNICATOR_H_
