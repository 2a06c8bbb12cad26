// The memory that all replicas share: few short values, kept by a process that
// outlives them.
#ifndef REPLICAS_MEMBERSHIP_REGISTERS_H_
#define REPLICAS_MEMBERSHIP_REGISTERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace fsdp::replicas {

// Linearizable: each call takes effect at one moment between its start and its
// end. Thread-safe; a call that waits holds no other up.
//
// Every call may fail with Unavailable: who keeps the values could not be
// reached within a time that the implementation bounds. It may have taken
// effect all the same, even later than the error is returned. All other errors
// last. One that kept values and has lost them (was started anew) is never
// connected to again: FailedPrecondition.
class Registers {
 public:
  virtual ~Registers() = default;

  virtual absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) = 0;
  virtual absl::Status Set(const std::string& key,
                           const std::string& value) = 0;
  // Sets `value`, which is not empty, where the key has `expected`; an empty
  // `expected` means that there is no such key. What the key has afterwards;
  // `expected` or nothing where there is none.
  virtual absl::StatusOr<std::string> CompareAndSet(
      const std::string& key, const std::string& expected,
      const std::string& value) = 0;
  // To a decimal number, 0 where there is none; the sum. InvalidArgument: the
  // key has something else.
  virtual absl::StatusOr<int64_t> Add(const std::string& key,
                                      int64_t addend) = 0;
  // OK also where there is none.
  virtual absl::Status Remove(const std::string& key) = 0;
  // Whether all of them are there; by one message, however many they are.
  virtual absl::StatusOr<bool> HasAll(const std::vector<std::string>& keys) = 0;
  // Waits until the key is there. DeadlineExceeded, at `deadline` and not
  // before: it is not. Unavailable only at `deadline`, too, so that who calls
  // this in a loop need not sleep.
  virtual absl::Status Await(const std::string& key, absl::Time deadline) = 0;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_REGISTERS_H_
