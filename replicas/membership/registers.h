// The memory that all replicas share: a few short values, kept by a process
// that outlives them.
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
// end. Thread-safe; a call that waits does not delay others.
//
// Every call may return Unavailable: the keeper could not be reached within a
// time that the implementation bounds. The call may still take effect, even
// later. All other errors last: FailedPrecondition if the keeper was started
// anew and has lost its values.
class Registers {
 public:
  virtual ~Registers() = default;

  virtual absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) = 0;
  virtual absl::Status Set(const std::string& key,
                           const std::string& value) = 0;
  // Sets `value`, which is not empty, if the key has `expected`, which is empty
  // if the key must not exist. Returns what the key has afterwards, or
  // `expected` or nothing if it does not exist.
  virtual absl::StatusOr<std::string> CompareAndSet(
      const std::string& key, const std::string& expected,
      const std::string& value) = 0;
  // Adds to a decimal number, which is 0 if the key does not exist, and returns
  // the sum. InvalidArgument: the key has another value.
  virtual absl::StatusOr<int64_t> Add(const std::string& key,
                                      int64_t addend) = 0;
  // OK also if the key does not exist.
  virtual absl::Status Remove(const std::string& key) = 0;
  // Returns whether all keys exist; takes one message.
  virtual absl::StatusOr<bool> HasAll(const std::vector<std::string>& keys) = 0;
  // Waits until the key exists. DeadlineExceeded: it does not, at `deadline`.
  // Unavailable, too, is only returned at `deadline`, so that a caller in a
  // loop need not sleep.
  virtual absl::Status Await(const std::string& key, absl::Time deadline) = 0;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_REGISTERS_H_
