#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/inspector.h"
#include "comm/rank_activity.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm {
namespace {

using Ticket = FlightRecorder::Ticket;

constexpr uint64_t kWorld = 1;  // the id of the group of all ranks
constexpr absl::string_view kCommonMemory = "common memory";

int64_t NowNs() { return absl::GetCurrentTimeNanos(); }

// Returns the same id, never 0, on ranks that make the same calls.
uint64_t IdOfPart(uint64_t whole, uint64_t which, uint64_t color) {
  uint64_t id = whole;
  for (const uint64_t value : {which, color}) {
    id = (id ^ (value + 1)) * uint64_t{0x9E3779B97F4A7C15};
    id ^= id >> 29;
  }
  return id | uint64_t{1} << 63;
}

class Recorded {
 public:
  Recorded(std::shared_ptr<Inspector> inspector,
           const FlightRecorder::Begun& begun)
      : inspector_(std::move(inspector)),
        ticket_(inspector_->recorder().Begin(begun, NowNs())) {}

  void Started(int64_t number) {
    inspector_->recorder().Started(ticket_, number);
  }
  void Waits() { inspector_->recorder().Waits(ticket_, NowNs()); }
  void Ends(OperationState state) {
    inspector_->recorder().Ends(ticket_, state, NowNs());
  }
  void Ends(const absl::Status& status) {
    Ends(status.ok() ? OperationState::kDone : OperationState::kFailed);
    if (!status.ok()) inspector_->OnFailure(ticket_, status);
  }

 private:
  std::shared_ptr<Inspector> inspector_;
  Ticket ticket_;
};

class InspectedWork final : public Work {
 public:
  InspectedWork(std::unique_ptr<Work> base, Recorded recorded, bool on_host)
      : base_(std::move(base)),
        recorded_(std::move(recorded)),
        on_host_(on_host) {}
  ~InspectedWork() override {
    if (!has_ended_) recorded_.Ends(OperationState::kDropped);
  }

  absl::Status Wait(absl::Time deadline) override {
    return Waited([&] { return base_->Wait(deadline); });
  }
  absl::Status WaitForResult(absl::Time deadline) override {
    return Waited([&] { return base_->WaitForResult(deadline); });
  }
  absl::Status BlockCurrentStream() override {
    if (on_host_) return Waited([&] { return base_->BlockCurrentStream(); });
    absl::Status status = base_->BlockCurrentStream();
    has_ended_ = true;
    if (status.ok()) {
      recorded_.Ends(OperationState::kOnDevice);
    } else {
      recorded_.Ends(status);
    }
    return status;
  }
  int64_t number() const override { return base_->number(); }

 private:
  template <typename Call>
  absl::Status Waited(Call wait) {
    recorded_.Waits();
    absl::Status status = wait();
    recorded_.Ends(status);
    has_ended_ = true;
    return status;
  }

  const std::unique_ptr<Work> base_;
  Recorded recorded_;
  const bool on_host_;
  bool has_ended_ = false;
};

// Each arrival is an operation, which ends with a wait or the next arrival.
class InspectedFence final : public Fence {
 public:
  InspectedFence(std::unique_ptr<Fence> base,
                 std::shared_ptr<Inspector> inspector, uint64_t id)
      : base_(std::move(base)),
        inspector_(std::move(inspector)),
        group_(inspector_->recorder().AddGroup(id)) {}

  void Arrive() override {
    base_->Arrive();
    if (!has_ended_) arrival_->Ends(OperationState::kDropped);
    arrival_.emplace(inspector_,
                     FlightRecorder::Begun{OperationKind::kFence, /*dtype=*/-1,
                                           group_, /*bytes=*/0, kCommonMemory});
    arrival_->Started(++arrivals_);
    has_ended_ = false;
  }

  absl::Status Wait(absl::Time deadline) override {
    if (!arrival_) return base_->Wait(deadline);
    arrival_->Waits();
    absl::Status status = base_->Wait(deadline);
    arrival_->Ends(status);
    has_ended_ = true;
    return status;
  }

 private:
  const std::unique_ptr<Fence> base_;
  const std::shared_ptr<Inspector> inspector_;
  const int group_;
  int64_t arrivals_ = 0;
  std::optional<Recorded> arrival_;  // the last one
  bool has_ended_ = true;
};

class InspectedCommunicator final : public ForwardingCommunicator {
 public:
  InspectedCommunicator(std::unique_ptr<Communicator> base,
                        std::shared_ptr<Inspector> inspector, uint64_t id)
      : ForwardingCommunicator(std::move(base)),
        inspector_(std::move(inspector)),
        id_(id),
        group_(inspector_->recorder().AddGroup(id)) {}
  ~InspectedCommunicator() override {
    if (id_ == kWorld) inspector_->Stop();
  }

  bool CanBeCaptured() const override { return base().CanBeCaptured(); }
  std::shared_ptr<RankActivity> activity() const override { return inspector_; }

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    Recorded recorded = Begin(OperationKind::kAllocate, bytes, "");
    auto memory = base().AllocateSymmetric(bytes);
    recorded.Ends(memory.status());
    return memory;
  }
  absl::StatusOr<CommonMemory> AllocateCommon(int64_t bytes) override {
    Recorded recorded = Begin(OperationKind::kAllocate, bytes, kCommonMemory);
    auto common = base().AllocateCommon(bytes);
    recorded.Ends(common.status());
    if (common.ok() && common->fence != nullptr) {
      common->fence = std::make_unique<InspectedFence>(
          std::move(common->fence), inspector_,
          IdOfPart(id_, num_parts_++, ~uint64_t{0}));
    }
    return common;
  }
  CreatedCommunicator Split(int color, int key) override {
    Recorded recorded = Begin(OperationKind::kSplit, 0, "the group");
    auto part = base().Split(color, key);
    recorded.Ends(part.status());
    FSDP_RETURN_IF_ERROR(part.status());
    return std::make_unique<InspectedCommunicator>(
        *std::move(part), inspector_,
        IdOfPart(id_, num_parts_++, static_cast<uint64_t>(color)));
  }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    const at::Tensor& whole = args.whole();
    Recorded recorded(inspector_,
                      {static_cast<OperationKind>(args.collective),
                       static_cast<int8_t>(whole.scalar_type()), group_,
                       static_cast<int64_t>(whole.nbytes()), label});
    StartedWork work = base().StartCollective(args, label);
    if (!work.ok()) {
      recorded.Ends(work.status());
      return work;
    }
    recorded.Started((*work)->number());
    return std::make_unique<InspectedWork>(
        *std::move(work), std::move(recorded), whole.device().is_cpu());
  }

 private:
  Recorded Begin(OperationKind kind, int64_t bytes, absl::string_view label) {
    return Recorded(inspector_, {kind, /*dtype=*/-1, group_, bytes, label});
  }

  const std::shared_ptr<Inspector> inspector_;
  const uint64_t id_;
  const int group_;
  uint64_t num_parts_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> Inspect(std::unique_ptr<Communicator> base,
                                      std::shared_ptr<Inspector> inspector) {
  return std::make_unique<InspectedCommunicator>(std::move(base),
                                                 std::move(inspector), kWorld);
}

}  // namespace fsdp::comm
