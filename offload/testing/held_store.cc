#include "offload/testing/held_store.h"

#include <cstdint>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "offload/param_store.h"
#include "offload/testing/forwarding_store.h"

namespace fsdp::offload::testing {
namespace {

class HeldTransfer : public Transfer {
 public:
  explicit HeldTransfer(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  ~HeldTransfer() override {
    gate_->Wait(absl::InfiniteFuture()).IgnoreError();
  }

  absl::Status Wait(absl::Time deadline) override {
    return gate_->Wait(deadline);
  }

 private:
  const std::shared_ptr<Gate> gate_;
};

class HeldStore : public ForwardingStore {
 public:
  HeldStore(std::unique_ptr<ParamStore> base, std::shared_ptr<Gate> gate)
      : ForwardingStore(std::move(base)), gate_(std::move(gate)) {}

  absl::StatusOr<std::unique_ptr<Transfer>> Write(
      absl::string_view region, int64_t offset,
      absl::Span<const char> in) override {
    FSDP_ASSIGN_OR_RETURN(const auto written,
                          ForwardingStore::Write(region, offset, in));
    FSDP_RETURN_IF_ERROR(written->Wait(absl::InfiniteFuture()));
    return absl::make_unique<HeldTransfer>(gate_);
  }

 private:
  const std::shared_ptr<Gate> gate_;
};

}  // namespace

void Gate::Close() {
  absl::MutexLock lock(&mutex_);
  open_ = false;
}

void Gate::Open(absl::Status result) {
  absl::MutexLock lock(&mutex_);
  open_ = true;
  result_ = std::move(result);
}

absl::Status Gate::Wait(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  if (mutex_.AwaitWithDeadline(absl::Condition(&open_), deadline)) {
    return result_;
  }
  return absl::DeadlineExceededError("a write is held by a test");
}

std::unique_ptr<ParamStore> WithHeldWrites(std::unique_ptr<ParamStore> base,
                                           std::shared_ptr<Gate> gate) {
  return absl::make_unique<HeldStore>(std::move(base), std::move(gate));
}

}  // namespace fsdp::offload::testing
