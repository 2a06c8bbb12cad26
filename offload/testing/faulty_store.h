// Stores that pass everything on, and fail, hesitate, do half of their work or
// wait when a test wants it.
#ifndef OFFLOAD_TESTING_FAULTY_STORE_H_
#define OFFLOAD_TESTING_FAULTY_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

// Says which operations fail, and how.
struct Fault {
  enum class Operation { kAny, kRead, kWrite, kFlush };
  Operation operation = Operation::kAny;
  std::optional<std::string> region;  // only of this one
  // The fault hits `count` of the operations that fit, from the `nth` on,
  // counted from 0.
  int64_t nth = 0;
  int64_t count = 1;

  enum class Effect {
    kRefuse,   // the call returns `error`
    kFail,     // nothing is done; Wait() returns `error`
    kShorten,  // the first half is done; Wait() returns `error`
    kDelay,    // all is done; Wait() returns `delay` after the start at the
               // earliest
  };
  Effect effect = Effect::kFail;
  absl::Status error = absl::UnavailableError("injected failure");
  absl::Duration delay = absl::Milliseconds(1);
};

// Makes a fault of any region.
Fault FaultOf(Fault::Operation operation, Fault::Effect effect, int64_t nth,
              int64_t count = 1);

// Returns a store that passes everything on to `base` except what fits one of
// `faults`, of which the first counts. Bytes that a failed write has not
// reached stay as they were, and no read says so.
std::unique_ptr<ParamStore> WithFaults(std::unique_ptr<ParamStore> base,
                                       std::vector<Fault> faults);

// Returns a HostStore that can roll back.
absl::StatusOr<std::unique_ptr<ParamStore>> RollingHostStore(int64_t capacity);

class ForwardingStore : public ParamStore {
 public:
  explicit ForwardingStore(std::unique_ptr<ParamStore> base)
      : base_(std::move(base)) {}

  absl::Status Create(absl::string_view region, int64_t bytes) override {
    return base_->Create(region, bytes);
  }
  absl::Status Erase(absl::string_view region) override {
    return base_->Erase(region);
  }
  absl::StatusOr<int64_t> Size(absl::string_view region) const override {
    return base_->Size(region);
  }
  absl::StatusOr<std::unique_ptr<Transfer>> Read(
      absl::string_view region, int64_t offset, absl::Span<char> out) override {
    return base_->Read(region, offset, out);
  }
  absl::StatusOr<std::unique_ptr<Transfer>> Write(
      absl::string_view region, int64_t offset,
      absl::Span<const char> in) override {
    return base_->Write(region, offset, in);
  }
  absl::StatusOr<std::unique_ptr<Transfer>> Flush() override {
    return base_->Flush();
  }
  absl::Status Rollback() override { return base_->Rollback(); }
  StoreStats Stats() const override { return base_->Stats(); }
  std::string Describe() const override { return base_->Describe(); }

 private:
  const std::unique_ptr<ParamStore> base_;
};

// A gate, which is open at first. Thread-safe.
class Gate {
 public:
  void Close();
  // Ends all that was held with `result`.
  void Open(absl::Status result = absl::OkStatus());
  // Waits until the gate is open and returns its result, or DeadlineExceeded.
  absl::Status Wait(absl::Time deadline);

 private:
  absl::Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

// Returns `base` with writes that are done at their start but end only when the
// gate is open.
std::unique_ptr<ParamStore> WithHeldWrites(std::unique_ptr<ParamStore> base,
                                           std::shared_ptr<Gate> gate);

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_FAULTY_STORE_H_
