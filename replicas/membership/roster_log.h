// The log of rosters, in registers.
#ifndef REPLICAS_MEMBERSHIP_ROSTER_LOG_H_
#define REPLICAS_MEMBERSHIP_ROSTER_LOG_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

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

// What replicas let each other know, in registers.

// Used by one thread at a time. Errors are those of Registers.
class NoticeBoard {
 public:
  struct Pending {
    std::vector<Notice> notices;
    int64_t seen = 0;
  };

  // `registers` outlives it.
  explicit NoticeBoard(Registers* registers) : registers_(registers) {}

  // The number of a notice that is to be written. It is lost where a roster has
  // seen that number before.
  absl::StatusOr<int64_t> Reserve();
  // May be repeated, with the same notice.
  absl::Status Write(int64_t number, const Notice& notice);
  // Those after number `after`, up to `seen`. Asks for none twice, but for
  // those that are not there, or are none. FailedPrecondition: there were more
  // once.
  absl::StatusOr<Pending> ReadAfter(int64_t after);
  // Those after `after`, up to `seen`, are of no more use to anybody.
  void Forget(int64_t after, int64_t seen);

 private:
  Registers* const registers_;
  std::map<int64_t, Notice> known_;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_ROSTER_LOG_H_
