#include "comm/c10d_backend/c10d_backend_group.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::comm {

C10dCompletion::C10dCompletion(WorkPtr work, std::function<void()> finish)
    : work_(std::move(work)), finish_(std::move(finish)) {}

C10dCompletion::~C10dCompletion() = default;

void C10dCompletion::Run(SideStream& side) {
  status_ = C10dToStatus("a work of c10d failed", [&] {
    const SideStream::Scope scope(side);
    if (work_ != nullptr) work_->wait();
    const c10::NoGradGuard no_grad;
    if (finish_) finish_();
    done_.Record(side.device());
  });
  finish_ = nullptr;
  has_run_.store(true, std::memory_order_release);
}

absl::StatusOr<bool> C10dCompletion::IsDone() const {
  if (has_run()) FSDP_RETURN_IF_ERROR(status_);
  bool done = false;
  FSDP_RETURN_IF_ERROR(C10dToStatus("ask for an event",
                                    [&] { done = has_run() && done_.Done(); }));
  if (work_ == nullptr) return done;
  // A stream that waits does not report the work's error.
  FSDP_RETURN_IF_ERROR(C10dToStatus("a work of c10d failed", [&] {
    if (!work_->isCompleted()) return;
    const std::exception_ptr error = work_->exception();
    if (error != nullptr) std::rethrow_exception(error);
  }));
  return done;
}

bool C10dCompletion::HasLetGo() const {
  if (!has_run()) return false;
  bool done = false;
  const absl::Status asked =
      C10dToStatus("ask for an event", [&] { done = done_.Done(); });
  return done || !asked.ok();
}

absl::Status C10dCompletion::BlockCurrentStream() const {
  FSDP_RETURN_IF_ERROR(status_);
  return C10dToStatus("make a stream wait",
                      [&] { done_.BlockCurrentStream(); });
}

C10dCompletionQueue::State::State(c10::Device device)
    : side(device, SideStream::Priority::kHigh) {}

C10dCompletionQueue::C10dCompletionQueue(c10::Device device, bool host_waits)
    : state_(std::make_shared<State>(device)) {
  if (!host_waits) return;
  thread_ = ValueOrThrow(
      StartThread("to wait for a backend", [state = state_] { state->Run(); }));
}

C10dCompletionQueue::~C10dCompletionQueue() { Stop(absl::ZeroDuration()); }

void C10dCompletionQueue::Add(std::shared_ptr<C10dCompletion> completion) {
  if (!thread_.joinable()) {
    completion->Run(state_->side);
    return;
  }
  absl::MutexLock lock(&state_->mutex);
  state_->queue.push_back(std::move(completion));
}

void C10dCompletionQueue::Stop(absl::Duration patience) {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&state_->mutex);
    state_->stopping = true;
    if (!state_->mutex.AwaitWithTimeout(absl::Condition(&state_->ended),
                                        patience)) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

void C10dCompletionQueue::State::Run() {
  const auto has_news = [this]() {
    mutex.AssertHeld();
    return stopping || !queue.empty();
  };
  while (true) {
    std::shared_ptr<C10dCompletion> completion;
    {
      absl::MutexLock lock(&mutex);
      mutex.Await(absl::Condition(&has_news));
      if (queue.empty()) {
        ended = true;
        return;
      }
      completion = std::move(queue.front());
      queue.pop_front();
    }
    completion->Run(side);
  }
}

namespace {

// The longest wait for a closed backend to let go of buffers and to end.
constexpr absl::Duration kPatience = absl::Seconds(5);

}  // namespace

C10dBackendGroup::C10dBackendGroup(c10::intrusive_ptr<c10d::Backend> backend,
                                   std::unique_ptr<ReportExchange> reports,
                                   Options options)
    : backend_(std::move(backend)),
      options_(std::move(options)),
      completions_(options_.device, options_.host_waits),
      watched_(std::move(reports), options_.watched,
               {[] { return absl::OkStatus(); },
                [this] {
                  // An error means that the group is closed already.
                  (void)C10dToStatus("close a group",
                                     [this] { options_.close(); });
                  absl::MutexLock lock(&mutex_);
                  closed_at_ = absl::Now();
                },
                [this] { EnterDevice(); }}) {}

absl::StatusOr<std::shared_ptr<C10dBackendGroup>> C10dBackendGroup::Create(
    c10::intrusive_ptr<c10d::Backend> backend,
    const c10::intrusive_ptr<c10d::Store>& store, Options options) {
  FSDP_ASSIGN_OR_RETURN(
      auto reports,
      ReportExchange::Create(store, backend->getRank(), backend->getSize()));
  std::shared_ptr<C10dBackendGroup> group;
  FSDP_RETURN_IF_ERROR(C10dToStatus("take a stream", [&] {
    group.reset(new C10dBackendGroup(std::move(backend), std::move(reports),
                                     std::move(options)));
  }));
  FSDP_RETURN_IF_ERROR(group->watched_.Start());
  return group;
}

C10dBackendGroup::~C10dBackendGroup() { Leave(); }

void C10dBackendGroup::Leave() {
  // If the host waits, the rank has waited for whatever it needs.
  const absl::Duration patience =
      options_.host_waits ? absl::ZeroDuration() : kPatience;
  watched_.Leave(patience, [this] {
    if (options_.leave && !watched_.failed()) {
      // An error means that the group has ended already.
      (void)C10dToStatus("leave a group", [this] { options_.leave(); });
    }
    completions_.Stop(Patience());
  });
}

// Makes the group's device the thread's current one. A thread begins with
// device 0, and LibTorch would set that up when it goes back to it.
void C10dBackendGroup::EnterDevice() {
  if (options_.device.is_cpu()) return;
  // Other calls report a device that has failed.
  (void)C10dToStatus("choose a device", [this] {
    c10::impl::VirtualGuardImpl(options_.device.type())
        .setDevice(options_.device);
  });
}

absl::StatusOr<std::shared_ptr<C10dBackendGroup::Operation>>
C10dBackendGroup::Launch(Call call, int64_t bytes, Start start, Finish finish) {
  FSDP_ASSIGN_OR_RETURN(auto entry, watched_.Begin(std::move(call), bytes));
  WorkPtr work;
  bool is_captured = false;
  absl::Status started = C10dToStatus(watched_.Describe(*entry), [&] {
    is_captured = options_.is_capturing && options_.is_capturing();
    work = start(*backend_);
  });
  if (absl::IsUnimplemented(started)) {
    watched_.Launched(*entry, [] { return true; });
    return started;
  }
  if (!started.ok()) return watched_.NotLaunched(*entry, started);
  const auto completion =
      std::make_shared<C10dCompletion>(std::move(work), std::move(finish));
  completions_.Add(completion);
  if (is_captured) {
    watched_.Launched(*entry, [] { return true; });
  } else {
    watched_.Launched(*entry, [completion] { return completion->IsDone(); });
  }
  return std::make_shared<Operation>(std::move(entry), completion, is_captured);
}

absl::Status C10dBackendGroup::Wait(const Operation& operation,
                                    absl::Time deadline) {
  if (operation.is_captured_) {
    return absl::FailedPreconditionError(absl::StrCat(
        watched_.Describe(*operation.entry_),
        ": it is part of a graph and runs when that does; wait for the stream "
        "that the graph is launched on"));
  }
  const absl::Status status = watched_.Wait(*operation.entry_, deadline);
  if (!status.ok()) AwaitLetGo(*operation.completion_);
  return status;
}

absl::Status C10dBackendGroup::BlockCurrentStream(const Operation& operation) {
  FSDP_RETURN_IF_ERROR(watched_.Check(*operation.entry_));
  if (options_.host_waits) {
    FSDP_RETURN_IF_ERROR(Wait(operation, absl::Now() + timeout()));
  }
  return operation.completion_->BlockCurrentStream();
}

// Keeps tensors until the backend lets go of them or has hung for kPatience.
struct C10dBackendGroup::Kept {
  ~Kept() { group->AwaitLetGo(*completion); }

  C10dBackendGroup* const group;
  const std::shared_ptr<C10dCompletion> completion;
  const std::vector<at::Tensor> tensors;
};

void C10dBackendGroup::Keep(const Operation& operation,
                            std::vector<at::Tensor> tensors) {
  watched_.Keep(*operation.entry_,
                std::shared_ptr<Kept>(
                    new Kept{this, operation.completion_, std::move(tensors)}));
}

absl::Duration C10dBackendGroup::Patience() {
  absl::MutexLock lock(&mutex_);
  if (!closed_at_) return kPatience;
  return std::max(absl::ZeroDuration(), *closed_at_ + kPatience - absl::Now());
}

void C10dBackendGroup::AwaitLetGo(const C10dCompletion& completion) {
  const absl::Time until = absl::Now() + Patience();
  while (!completion.HasLetGo() && absl::Now() < until) {
    absl::SleepFor(absl::Milliseconds(1));
  }
}

void C10dBackendGroup::Abort(const absl::Status& reason) {
  watched_.Abort(reason);
}

}  // namespace fsdp::comm
