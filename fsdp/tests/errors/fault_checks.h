// Checks of a model that has failed.
#ifndef FSDP_TESTS_ERRORS_FAULT_CHECKS_H_
#define FSDP_TESTS_ERRORS_FAULT_CHECKS_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "fsdp/testing/fault_injector.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/errors/fault_cases.h"

namespace fsdp::testing::faults {

// The end of an iteration, and the type of its exception.
struct Outcome {
  absl::Status status;
  std::optional<FaultType> type;
};

Outcome Iterate(const Case& c, Trainer& trainer, int64_t part);

absl::Status Wrong(const std::string& text);

// Checks that the outcome is the injected fault, by text and code, and with
// `keeps_type` by type, too.
absl::Status CheckReported(const Outcome& outcome,
                           const FaultInjector& injector, FaultType type,
                           bool keeps_type);

using Values = std::vector<at::Tensor>;

Values ShardsOf(const Trainer& trainer);
void SetShards(Trainer& trainer, const Values& values);

// Checks that each parameter has one of these values, and nothing in between.
absl::Status CheckNotTorn(const Trainer& trainer,
                          const std::vector<Values>& choices);
absl::Status CheckNothingGathered(const Trainer& trainer);
// Checks that both have done the same iteration.
absl::Status CheckSame(const Trainer& trainer, const Trainer& reference);

// Checks that a peer of rank `faulty_rank` has ended with its name, or without
// an error.
absl::Status CheckNamed(const absl::Status& status, int faulty_rank);

// A new group whose ranks have injectors.
class Group {
 public:
  Group(int world, bool aborts);

  FaultInjector* injector(int rank) { return &injectors_[rank]; }
  // Returns whether an injected fault has occurred on any rank.
  bool has_failed() const;

  absl::Status Run(const std::function<absl::Status(Communicator&)>& run);

 private:
  std::vector<FaultInjector> injectors_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// Waits until all ranks have called it, so that no rank learns of a failure by
// the end of another.
class EndOfAll {
 public:
  explicit EndOfAll(int world) : running_(world) {}

  absl::Status Reach();

 private:
  absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::testing::faults

#endif  // FSDP_TESTS_ERRORS_FAULT_CHECKS_H_
