// A started operation of a group that runs on a stream of a device.
#ifndef COMM_GROUP_STREAM_WORK_H_
#define COMM_GROUP_STREAM_WORK_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// `Group` has a type Operation and
//   absl::Status Wait(const Operation&, absl::Time deadline)
//   absl::Status BlockCurrentStream(const Operation&)
// with the errors of Work's methods, and
//   void Keep(const Operation&, std::vector<at::Tensor>)
// for tensors that the device may still use when nobody waits any more. The
// work keeps the group alive.
//
// After Wait() the tensors are free. After BlockCurrentStream() they are the
// caller's, in the order of that stream. A work that is destroyed after neither
// hands them to the group. BlockCurrentStream() after Wait() asks nothing of
// the device: while the current stream is captured into a graph, it may not
// wait for operations that began before.
template <typename Group>
class StreamWork final : public Work {
 public:
  StreamWork(std::shared_ptr<Group> group,
             std::shared_ptr<typename Group::Operation> operation,
             std::vector<at::Tensor> tensors)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        tensors_(std::move(tensors)) {}
  ~StreamWork() override {
    if (!is_ordered_) group_->Keep(*operation_, std::move(tensors_));
  }

  absl::Status Wait(absl::Time deadline) override {
    if (!result_) {
      result_ = group_->Wait(*operation_, deadline);
      is_ordered_ = true;
      tensors_.clear();
    }
    return *result_;
  }

  absl::Status BlockCurrentStream() override {
    if (result_) return *result_;
    const absl::Status status = group_->BlockCurrentStream(*operation_);
    is_ordered_ = is_ordered_ || status.ok();
    return status;
  }

 private:
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<typename Group::Operation> operation_;
  std::vector<at::Tensor> tensors_;
  bool is_ordered_ = false;  // nobody frees the tensors too early
  std::optional<absl::Status> result_;
};

}  // namespace fsdp::comm

#endif  // COMM_GROUP_STREAM_WORK_H_
