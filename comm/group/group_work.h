// A started operation of a backend that keeps its own groups.
#ifndef COMM_GROUP_GROUP_WORK_H_
#define COMM_GROUP_GROUP_WORK_H_

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "comm/work.h"

namespace fsdp::comm {

// `Group` has a type Operation and Wait(Operation&, absl::Time), with the
// errors of Work::Wait(), for which this keeps it alive.
template <typename Group>
class GroupWork final : public Work {
 public:
  GroupWork(std::shared_ptr<Group> group,
            std::shared_ptr<typename Group::Operation> operation,
            absl::Duration timeout)
      : group_(std::move(group)),
        operation_(std::move(operation)),
        timeout_(timeout) {}

  absl::Status Wait(absl::Time deadline) override {
    return group_->Wait(*operation_, deadline);
  }
  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + timeout_);
  }

 private:
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<typename Group::Operation> operation_;
  const absl::Duration timeout_;
};

}  // namespace fsdp::comm

#endif  // COMM_GROUP_GROUP_WORK_H_
