// The log of rosters, in registers.
#ifndef REPLICAS_MEMBERSHIP_ROSTER_LOG_H_
#define REPLICAS_MEMBERSHIP_ROSTER_LOG_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

// A ring of registers that has the newest `entries`: entry n lies where entry
// n - entries lay, and is exchanged for exactly that. A text has its number in
// it, so that nobody who was stopped meanwhile exchanges anything. Thread-safe;
// all processes have the same `entries`. Errors are those of Registers, and
// InvalidArgument for what is no roster.
class RosterLog {
 public:
  // `registers` outlives it.
  RosterLog(Registers* registers, int64_t entries)
      : registers_(registers), entries_(entries) {}

  // nullopt: not made yet. OutOfRange: it was, but a newer one lies
  // there.
  absl::StatusOr<std::optional<Roster>> Entry(int64_t number);
  // The newest one; `known` where there is no newer.
  absl::StatusOr<Roster> Newest(Roster known);
  // Makes entry next.number, which follows one that was made, unless it was
  // made already, and tells whether it did so.
  absl::StatusOr<bool> Propose(const Roster& next);
  // Waits for the entry. DeadlineExceeded, which may come for an entry that has
  // been made: who made it may have ended before it could tell.
  absl::Status Await(int64_t number, absl::Time deadline);

 private:
  std::string SlotOf(int64_t number) const;
  // What lies there; number -1 where nothing does.
  absl::StatusOr<Roster> Read(const std::string& slot);

  Registers* const registers_;
  const int64_t entries_;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_ROSTER_LOG_H_
