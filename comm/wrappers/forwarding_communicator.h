// A base class for communicators that add something to another one.
#ifndef COMM_WRAPPERS_FORWARDING_COMMUNICATOR_H_
#define COMM_WRAPPERS_FORWARDING_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"

namespace fsdp::comm {

// Passes every call on to another communicator. CanBeCaptured() is false unless
// a subclass, whose waits may need the host, overrides it. Split() gives a
// plain sub-group of the other communicator.
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

  // Passes `args` to base(). Those of a ReduceScatterScaled() come here, too.
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    return base_->StartCollective(args, label);
  }
  StartedWork DoScaledSum(const CollectiveArgs& args,
                          absl::string_view label) override {
    return DoCollective(args, label);
  }

 private:
  const std::shared_ptr<Communicator> base_;
};

}  // namespace fsdp::comm

#endif  // COMM_WRAPPERS_FORWARDING_COMMUNICATOR_H_
