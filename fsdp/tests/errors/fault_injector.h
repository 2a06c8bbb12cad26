// Lets a program fail at each of the points that it passes.
#ifndef FSDP_TESTS_ERRORS_FAULT_INJECTOR_H_
#define FSDP_TESTS_ERRORS_FAULT_INJECTOR_H_

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/testing/users_error.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

// The error of a point that fails.
enum class FaultType {
  kStatus,  // DataLoss: returned where that is possible, else a StatusError
  kUsers,   // a UsersError
  kTorch,   // a c10::Error
};

// Belongs to one rank and is used by its thread.
class FaultInjector {
 public:
  static constexpr char kAllocation[] = "an allocation";

  // Lets a point fail: number `point`, counted from here, of those that have
  // `part` in their name.
  void Arm(int64_t point, FaultType type, absl::string_view part = "") {
    armed_ = true;
    countdown_ = point;
    part_ = std::string(part);
    type_ = type;
    failed_at_.clear();
    failed_in_backward_ = false;
  }
  void Disarm() { armed_ = false; }

  // Returns the point that has failed since Arm(), or "" if the program did not
  // reach it.
  const std::string& failed_at() const { return failed_at_; }
  // Returns whether the failure was inside a backward.
  bool failed_in_backward() const { return failed_in_backward_; }
  // Returns a part of the error's text.
  std::string text() const { return absl::StrCat("injected at ", failed_at_); }

  // Passes a point in code that cannot return a Status.
  void Pass(absl::string_view point) {
    if (!Fails(point)) return;
    switch (type_) {
      case FaultType::kStatus:
        throw StatusError(absl::DataLossError(text()));
      case FaultType::kUsers:
        throw UsersError(text());
      case FaultType::kTorch:
        TORCH_CHECK(false, text());
    }
  }
  // Passes a point in code that returns a Status, but may throw as well.
  absl::Status PassOrReturn(absl::string_view point) {
    if (type_ == FaultType::kStatus) return PassNoThrow(point);
    Pass(point);
    return absl::OkStatus();
  }
  // Passes a point in code that never throws; only kStatus fails there.
  absl::Status PassNoThrow(absl::string_view point) {
    if (type_ != FaultType::kStatus || !Fails(point)) return absl::OkStatus();
    return absl::DataLossError(text());
  }

  // Returns `x` and passes three points: now, in a tensor's hook, and in the
  // backward of a custom autograd function.
  at::Tensor Pass(absl::string_view point, const at::Tensor& x);

 private:
  bool Fails(absl::string_view point) {
    if (!armed_ || !absl::StrContains(point, part_)) return false;
    if (countdown_-- != 0) return false;
    armed_ = false;
    failed_at_ = std::string(point);
    failed_in_backward_ = torch::autograd::get_current_graph_task_id() != -1;
    return true;
  }

  bool armed_ = false;
  int64_t countdown_ = 0;
  std::string part_;
  FaultType type_ = FaultType::kStatus;
  std::string failed_at_;
  bool failed_in_backward_ = false;
};

class PassInBackward : public torch::autograd::Function<PassInBackward> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, FaultInjector* injector,
                            const std::string& point) {
    context->saved_data["injector"] = reinterpret_cast<int64_t>(injector);
    context->saved_data["point"] = point;
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    // Saved data are numbers and texts.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    reinterpret_cast<FaultInjector*>(context->saved_data["injector"].toInt())
        ->Pass(context->saved_data["point"].toStringRef());
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

inline at::Tensor FaultInjector::Pass(absl::string_view point,
                                      const at::Tensor& x) {
  Pass(point);
  at::Tensor y =
      PassInBackward::apply(x, this, absl::StrCat("the backward of ", point));
  if (y.requires_grad()) {
    y.register_hook([this, name = absl::StrCat("a hook of ", point)](
                        const at::Tensor&) { Pass(name); });
  }
  return y;
}

class FaultyWork final : public comm::Work {
 public:
  FaultyWork(std::unique_ptr<comm::Work> base, absl::Duration timeout,
             std::function<absl::Status()> pass)
      : base_(std::move(base)), timeout_(timeout), pass_(std::move(pass)) {}

  // Takes the real result first, after which nobody writes into the buffers.
  absl::Status Wait(absl::Time deadline) override {
    FSDP_RETURN_IF_ERROR(base_->Wait(deadline));
    if (!result_.has_value()) result_ = pass_();
    return *result_;
  }
  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + timeout_);
  }

 private:
  const std::unique_ptr<comm::Work> base_;
  const absl::Duration timeout_;
  const std::function<absl::Status()> pass_;
  std::optional<absl::Status> result_;
};

// Passes a point before everything that `base` and its sub-groups do, and
// before a wait returns. If `aborts`, a failure aborts `base`, as its own
// failures do. `injector` must outlive it.
class FaultyCommunicator final : public comm::ForwardingCommunicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> base,
                     FaultInjector* injector, bool aborts)
      : ForwardingCommunicator(std::move(base)),
        injector_(injector),
        aborts_(aborts) {}

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    // LibTorch's allocators throw.
    FSDP_RETURN_IF_ERROR(injector_->PassOrReturn(FaultInjector::kAllocation));
    return base().AllocateSymmetric(bytes);
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color,
                                                      int key) override {
    FSDP_RETURN_IF_ERROR(PassPoint("a split"));
    FSDP_ASSIGN_OR_RETURN(auto group, base().Split(color, key));
    return std::make_unique<FaultyCommunicator>(std::move(group), injector_,
                                                aborts_);
  }

 private:
  comm::StartedWork DoCollective(const comm::CollectiveArgs& args,
                                 absl::string_view label) override {
    const std::string point = absl::StrCat(
        "the ", comm::CollectiveName(args.collective), " of ", label);
    FSDP_RETURN_IF_ERROR(PassPoint(point));
    FSDP_ASSIGN_OR_RETURN(auto work, base().StartCollective(args, label));
    return std::make_unique<FaultyWork>(
        std::move(work), default_timeout(), [this, point] {
          return PassPoint(absl::StrCat("the wait for ", point));
        });
  }

  absl::Status PassPoint(const std::string& point) {
    absl::Status status = injector_->PassNoThrow(point);
    if (!status.ok() && aborts_) base().Abort(status);
    return status;
  }

  FaultInjector* const injector_;
  const bool aborts_;
};

}  // namespace fsdp::testing

#endif  // FSDP_TESTS_ERRORS_FAULT_INJECTOR_H_
