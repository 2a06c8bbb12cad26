// A base class for communicators that add something to another one.
#ifndef COMM_WRAPPERS_FORWARDING_COMMUNICATOR_H_
#define COMM_WRAPPERS_FORWARDING_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"

namespace fsdp::comm {

// Passes every call on to another communicator, collectives by way of
// Intercept(). ReduceScatterScaled() calls DoReduceScatter(), so that a
// subclass sees it, and makes the host wait for the scaling; so CanBeCaptured()
// is false unless a subclass overrides it. Split() gives a plain sub-group of
// the other communicator.
class ForwardingCommunicator : public Communicator {
 public:
  explicit ForwardingCommunicator(std::shared_ptr<Communicator> base)
      : base_(std::move(base)) {
    FSDP_CHECK(base_ != nullptr);
  }

  int rank() const override { return base_->rank(); }
  int world_size() const override { return base_->world_size(); }
  const RankNames& names() const override { return base_->names(); }
  absl::Duration default_timeout() const override {
    return base_->default_timeout();
  }
  std::string ToString() const override { return base_->ToString(); }
  bool PrefersScaledInputs() const override {
    return base_->PrefersScaledInputs();
  }
  bool HasAllToAll() const override { return base_->HasAllToAll(); }
  bool HasCommonMemory() const override { return base_->HasCommonMemory(); }
  std::shared_ptr<RankActivity> activity() const override {
    return base_->activity();
  }
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    return base_->AllocateSymmetric(bytes);
  }
  absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes) override {
    return base_->AllocateCommon(bytes);
  }
  CreatedCommunicator Split(int color, int key) override {
    return base_->Split(color, key);
  }
  void Abort(const absl::Status& reason) override { base_->Abort(reason); }

 protected:
  Communicator& base() { return *base_; }
  const Communicator& base() const { return *base_; }

  using Pass = absl::FunctionRef<StartedWork()>;

  // Called for each collective, which pass() starts in base(). `whole` is the
  // tensor that has the data of all ranks.
  virtual StartedWork Intercept(Collective /*collective*/,
                                absl::string_view /*label*/,
                                const at::Tensor& /*whole*/, Pass pass) {
    return pass();
  }

  StartedWork DoAllGather(const at::Tensor& out, const at::Tensor& in,
                          absl::string_view label) override {
    return Intercept(Collective::kAllGather, label, out,
                     [&] { return base_->AllGather(out, in, label); });
  }
  StartedWork DoReduceScatter(const at::Tensor& out, const at::Tensor& in,
                              ReduceOp op, absl::string_view label) override {
    return Intercept(Collective::kReduceScatter, label, in,
                     [&] { return base_->ReduceScatter(out, in, op, label); });
  }
  StartedWork DoAllToAll(const at::Tensor& out, const at::Tensor& in,
                         absl::string_view label) override {
    return Intercept(Collective::kAllToAll, label, in,
                     [&] { return base_->AllToAll(out, in, label); });
  }
  StartedWork DoAllReduce(const at::Tensor& tensor, ReduceOp op,
                          absl::string_view label) override {
    return Intercept(Collective::kAllReduce, label, tensor,
                     [&] { return base_->AllReduce(tensor, op, label); });
  }
  StartedWork DoBroadcast(const at::Tensor& tensor, int root,
                          absl::string_view label) override {
    return Intercept(Collective::kBroadcast, label, tensor,
                     [&] { return base_->Broadcast(tensor, root, label); });
  }

 private:
  const std::shared_ptr<Communicator> base_;
};

}  // namespace fsdp::comm

#endif  // COMM_WRAPPERS_FORWARDING_COMMUNICATOR_H_
