// What is expected of a model that has failed.
#ifndef FSDP_TESTS_ERRORS_FAULT_CHECKS_H_
#define FSDP_TESTS_ERRORS_FAULT_CHECKS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"
#include "fsdp/testing/fault_injector.h"
#include "fsdp/tests/errors/fault_cases.h"

namespace fsdp::faults {

using ::fsdp::testing::FaultType;

// How an iteration has ended, and with which type of exception.
struct Outcome {
  absl::Status status;
  std::optional<FaultType> type;
};

Outcome Iterate(const Case& c, Trainer& trainer, int64_t part);

absl::Status Wrong(const std::string& text);

// The fault as it was injected, by its text and code, and by its type where
// nothing returns a Status on the way.
absl::Status CheckReported(const Outcome& outcome,
                           const FaultInjector& injector, FaultType type,
                           bool keeps_type);

using Values = std::vector<at::Tensor>;

Values ShardsOf(const Trainer& trainer);
void SetShards(Trainer& trainer, const Values& values);

// Each parameter has one of these values, and not something in between.
absl::Status CheckNotTorn(const Trainer& trainer,
                          const std::vector<Values>& choices);
absl::Status CheckNothingGathered(const Trainer& trainer);
// Both have done the same iteration.
absl::Status CheckSame(const Trainer& trainer, const Trainer& reference);

// A peer of rank `faulty_rank` has ended with its name, or not at all.
absl::Status CheckNamed(const absl::Status& status, int faulty_rank);

// A new group whose ranks have injectors.
class Group {
 public:
  Group(int world, bool aborts);

  FaultInjector* injector(int rank) { return &injectors_[rank]; }
  // Whether any rank has failed as it was told.
  bool has_failed() const;

  absl::Status Run(const std::function<absl::Status(Communicator&)>& run);

 private:
  std::vector<FaultInjector> injectors_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// Waits until all ranks have called it, so that none is told of a failure by
// the end of another.
class EndOfAll {
 public:
  explicit EndOfAll(int world) : running_(world) {}

  absl::Status Reach();

 private:
  absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::faults

#endif  // FSDP_TESTS_ERRORS_FAULT_CHECKS_H_
