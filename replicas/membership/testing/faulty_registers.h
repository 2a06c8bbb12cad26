// A simulated process's access to the registers, to which anything may happen.
#ifndef REPLICAS_MEMBERSHIP_TESTING_FAULTY_REGISTERS_H_
#define REPLICAS_MEMBERSHIP_TESTING_FAULTY_REGISTERS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas::testing {

// Fates of a call; all but kDone are Unavailable.
enum class Fate {
  kDone,
  kLost,     // nobody hears of it
  kNoReply,  // it is done
  kDelayed,  // it is done later
};

// Is for one thread. It waits for nothing: Await() returns at once.
class FaultyRegisters final : public Registers {
 public:
  struct Hooks {
    // Is asked before each call; others may run meanwhile.
    std::function<Fate()> fate;
    // Takes a call that is to be done later.
    std::function<void(const std::function<void()>&)> later;
    // Is called after each exchange.
    std::function<void()> exchanged;
  };

  // `base` outlives it and everything that is to be done later.
  FaultyRegisters(Registers* base, Hooks hooks)
      : base_(base), hooks_(std::move(hooks)) {}

  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override;
  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            const std::string& value) override;
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend) override;
  absl::Status Remove(const std::string& key) override;
  absl::StatusOr<bool> HasAll(const std::vector<std::string>& keys) override;
  absl::Status Await(const std::string& key, absl::Time deadline) override;

 private:
  // OK: make the call and return its reply.
  absl::Status Meet(const std::function<void()>& call);

  Registers* const base_;
  const Hooks hooks_;
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_FAULTY_REGISTERS_H_
