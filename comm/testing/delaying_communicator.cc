#include "comm/testing/delaying_communicator.h"

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm::testing {

void Gate::Hold(absl::string_view label) {
  absl::MutexLock lock(&mutex_);
  held_.emplace(label);
}

void Gate::Release(absl::string_view label) {
  absl::MutexLock lock(&mutex_);
  held_.erase(std::string(label));
}

void Gate::ReleaseAll() {
  absl::MutexLock lock(&mutex_);
  held_.clear();
}

absl::Status Gate::AwaitHeld(absl::string_view label, absl::Time deadline) {
  const auto seen = [this, label]() {
    mutex_.AssertHeld();
    return seen_.find(label) != seen_.end();
  };
  absl::MutexLock lock(&mutex_);
  if (mutex_.AwaitWithDeadline(absl::Condition(&seen), deadline)) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(
      absl::StrCat("no operation of ", label, " has come to the gate"));
}

bool Gate::Enter(absl::string_view label) {
  absl::MutexLock lock(&mutex_);
  if (held_.find(label) == held_.end()) return false;
  seen_.emplace(label);
  return true;
}

bool Gate::IsOpen(absl::string_view label) {
  absl::MutexLock lock(&mutex_);
  return held_.find(label) == held_.end();
}

absl::Status Gate::AwaitOpen(absl::string_view label, absl::Time deadline) {
  const auto open = [this, label]() {
    mutex_.AssertHeld();
    return held_.find(label) == held_.end();
  };
  absl::MutexLock lock(&mutex_);
  if (mutex_.AwaitWithDeadline(absl::Condition(&open), deadline)) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(label, " is held"));
}

class DelayingCommunicator final : public ForwardingCommunicator {
 public:
  DelayingCommunicator(std::unique_ptr<Communicator> base, Gate* gate)
      : ForwardingCommunicator(std::move(base)), gate_(gate) {}

 private:
  // An operation, before and after it is started in the base.
  struct Operation {
    std::string label;
    std::function<StartedWork()> start;
    bool held = false;
    std::optional<StartedWork> work;
  };

  class DelayedWork final : public Work {
   public:
    DelayedWork(DelayingCommunicator* owner,
                std::shared_ptr<Operation> operation)
        : owner_(owner), operation_(std::move(operation)) {}
    absl::Status Wait(absl::Time deadline) override {
      if (!result_) result_ = owner_->Finish(*operation_, deadline);
      return *result_;
    }
    absl::Status BlockCurrentStream() override {
      return Wait(absl::Now() + owner_->default_timeout());
    }

   private:
    DelayingCommunicator* const owner_;
    const std::shared_ptr<Operation> operation_;
    std::optional<absl::Status> result_;
  };

  StartedWork DoAllGather(const at::Tensor& out, const at::Tensor& in,
                          absl::string_view label) override {
    return Post(label, [this, out, in, name = std::string(label)] {
      return base().AllGather(out, in, name);
    });
  }
  StartedWork DoReduceScatter(const at::Tensor& out, const at::Tensor& in,
                              ReduceOp op, absl::string_view label) override {
    return Post(label, [this, out, in, op, name = std::string(label)] {
      return base().ReduceScatter(out, in, op, name);
    });
  }
  StartedWork DoAllToAll(const at::Tensor& out, const at::Tensor& in,
                         absl::string_view label) override {
    return Post(label, [this, out, in, name = std::string(label)] {
      return base().AllToAll(out, in, name);
    });
  }
  StartedWork DoAllReduce(const at::Tensor& tensor, ReduceOp op,
                          absl::string_view label) override {
    return Post(label, [this, tensor, op, name = std::string(label)] {
      return base().AllReduce(tensor, op, name);
    });
  }
  StartedWork DoBroadcast(const at::Tensor& tensor, int root,
                          absl::string_view label) override {
    return Post(label, [this, tensor, root, name = std::string(label)] {
      return base().Broadcast(tensor, root, name);
    });
  }

  StartedWork Post(absl::string_view label,
                   std::function<StartedWork()> start) {
    auto operation = std::make_shared<Operation>();
    operation->label = std::string(label);
    operation->start = std::move(start);
    operation->held = gate_->Enter(label);
    queue_.push_back(operation);
    StartWhatIsFree();
    if (operation->work && !operation->work->ok()) {
      return operation->work->status();
    }
    return std::make_unique<DelayedWork>(this, std::move(operation));
  }

  void StartWhatIsFree() {
    while (!queue_.empty()) {
      Operation& next = *queue_.front();
      if (next.held && !gate_->IsOpen(next.label)) return;
      next.work = next.start();
      next.start = nullptr;
      queue_.pop_front();
    }
  }

  absl::Status Finish(Operation& operation, absl::Time deadline) {
    while (!operation.work) {
      const std::shared_ptr<Operation> next = queue_.front();
      absl::Status open;
      if (next->held) open = gate_->AwaitOpen(next->label, deadline);
      if (!open.ok()) {
        base().Abort(open);
        return open;
      }
      StartWhatIsFree();
    }
    FSDP_RETURN_IF_ERROR(operation.work->status());
    return (**operation.work)->Wait(deadline);
  }

  Gate* const gate_;
  std::deque<std::shared_ptr<Operation>> queue_;  // not started, in order
};

std::unique_ptr<Communicator> Delay(std::unique_ptr<Communicator> base,
                                    Gate* gate) {
  return std::make_unique<DelayingCommunicator>(std::move(base), gate);
}

}  // namespace fsdp::comm::testing
