#include "offload/testing/faulty_store.h"

#include <algorithm>
#include <map>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "offload/host_store.h"

namespace fsdp::offload::testing {

namespace {

using Started = absl::StatusOr<std::unique_ptr<Transfer>>;

// Ends with `error` once `base` is over.
class FailedTransfer : public Transfer {
 public:
  FailedTransfer(std::unique_ptr<Transfer> base, absl::Status error)
      : base_(std::move(base)), error_(std::move(error)) {}

  absl::Status Wait(absl::Time deadline) override {
    const absl::Status result = base_->Wait(deadline);
    return absl::IsDeadlineExceeded(result) ? result : error_;
  }

 private:
  const std::unique_ptr<Transfer> base_;
  const absl::Status error_;
};

class DelayedTransfer : public Transfer {
 public:
  DelayedTransfer(std::unique_ptr<Transfer> base, absl::string_view region,
                  absl::Time not_before)
      : base_(std::move(base)), region_(region), not_before_(not_before) {}

  absl::Status Wait(absl::Time deadline) override {
    const absl::Time now = absl::Now();
    absl::SleepFor(std::min(not_before_, deadline) - now);
    if (deadline < not_before_ && now < not_before_) {
      return absl::DeadlineExceededError(absl::StrCat(
          "a transfer of region '", region_, "' is delayed by a test"));
    }
    return base_->Wait(deadline);
  }

 private:
  const std::unique_ptr<Transfer> base_;
  const std::string region_;
  const absl::Time not_before_;
};

class FaultyStore : public ForwardingStore {
 public:
  FaultyStore(std::unique_ptr<ParamStore> base, std::vector<Fault> faults)
      : ForwardingStore(std::move(base)), faults_(std::move(faults)) {
    seen_.resize(faults_.size());
  }

  Started Read(absl::string_view region, int64_t offset,
               absl::Span<char> out) override {
    return Start(
        Fault::Operation::kRead, region,
        [&] { return ForwardingStore::Read(region, offset, out); },
        [&] { return ForwardingStore::Read(region, offset, Half(out)); });
  }

  Started Write(absl::string_view region, int64_t offset,
                absl::Span<const char> in) override {
    return Start(
        Fault::Operation::kWrite, region,
        [&] { return ForwardingStore::Write(region, offset, in); },
        [&] { return ForwardingStore::Write(region, offset, Half(in)); });
  }

  Started Flush() override {
    const auto flush = [&] { return ForwardingStore::Flush(); };
    return Start(Fault::Operation::kFlush, "", flush, flush);
  }

 private:
  template <typename T>
  static absl::Span<T> Half(absl::Span<T> all) {
    return all.subspan(0, all.size() / 2);
  }

  // Returns the fault of the operation that starts now, or null.
  const Fault* Next(Fault::Operation operation, absl::string_view region) {
    absl::MutexLock lock(&mutex_);
    const Fault* result = nullptr;
    for (size_t i = 0; i < faults_.size(); ++i) {
      const Fault& fault = faults_[i];
      if (fault.operation != Fault::Operation::kAny &&
          fault.operation != operation) {
        continue;
      }
      if (fault.region.has_value() && *fault.region != region) continue;
      const int64_t index = seen_[i]++;
      if (result == nullptr && index >= fault.nth &&
          index - fault.nth < fault.count) {
        result = &fault;
      }
    }
    return result;
  }

  Started Start(Fault::Operation operation, absl::string_view region,
                absl::FunctionRef<Started()> all,
                absl::FunctionRef<Started()> half) {
    const Fault* fault = Next(operation, region);
    if (fault == nullptr) return all();
    if (fault->effect == Fault::Effect::kRefuse) return fault->error;
    if (fault->effect == Fault::Effect::kFail) {
      return absl::make_unique<FinishedTransfer>(fault->error);
    }
    const absl::Time start = absl::Now();
    if (fault->effect == Fault::Effect::kShorten) {
      FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Transfer> base, half());
      return absl::make_unique<FailedTransfer>(std::move(base), fault->error);
    }
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Transfer> base, all());
    return absl::make_unique<DelayedTransfer>(std::move(base), region,
                                              start + fault->delay);
  }

  const std::vector<Fault> faults_;
  absl::Mutex mutex_;
  std::vector<int64_t> seen_ ABSL_GUARDED_BY(mutex_);  // that fit, by fault
};

class RollingStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;

  absl::Status Create(absl::string_view region, int64_t bytes) override {
    const absl::MutexLock lock(&mutex_);
    FSDP_RETURN_IF_ERROR(ForwardingStore::Create(region, bytes));
    flushed_[std::string(region)].resize(bytes);
    return absl::OkStatus();
  }
  absl::Status Erase(absl::string_view region) override {
    const absl::MutexLock lock(&mutex_);
    flushed_.erase(std::string(region));
    return ForwardingStore::Erase(region);
  }
  Started Flush() override {
    const absl::MutexLock lock(&mutex_);
    for (auto& [region, bytes] : flushed_) {
      FSDP_RETURN_IF_ERROR(Read(region, 0, absl::MakeSpan(bytes)).status());
    }
    return ForwardingStore::Flush();
  }
  absl::Status Rollback() override {
    const absl::MutexLock lock(&mutex_);
    for (const auto& [region, bytes] : flushed_) {
      FSDP_RETURN_IF_ERROR(Write(region, 0, bytes).status());
    }
    return absl::OkStatus();
  }

 private:
  absl::Mutex mutex_;
  // As of the last flush.
  std::map<std::string, std::string> flushed_ ABSL_GUARDED_BY(mutex_);
};

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

  Started Write(absl::string_view region, int64_t offset,
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

absl::StatusOr<std::unique_ptr<ParamStore>> RollingHostStore(int64_t capacity) {
  FSDP_ASSIGN_OR_RETURN(auto base, HostStore::Make(capacity));
  return absl::make_unique<RollingStore>(std::move(base));
}

Fault FaultOf(Fault::Operation operation, Fault::Effect effect, int64_t nth,
              int64_t count) {
  Fault fault;
  fault.operation = operation;
  fault.effect = effect;
  fault.nth = nth;
  fault.count = count;
  return fault;
}

std::unique_ptr<ParamStore> WithFaults(std::unique_ptr<ParamStore> base,
                                       std::vector<Fault> faults) {
  return absl::make_unique<FaultyStore>(std::move(base), std::move(faults));
}

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
