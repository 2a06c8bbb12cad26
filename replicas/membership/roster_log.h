// Replicas keep the log of rosters, notices to each other and signs of life in
// registers.
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

// A ring of registers with the newest `entries`: entry n replaces exactly entry
// n - entries. A text has its number in it, so that a process that was stopped
// meanwhile replaces nothing. Thread-safe; all processes have the same
// `entries`. Errors are those of Registers, and InvalidArgument for a text that
// is no roster.
class RosterLog {
 public:
  // `registers` outlives it.
  RosterLog(Registers* registers, int64_t entries)
      : registers_(registers), entries_(entries) {}

  // Returns nullopt if the entry is not made yet. OutOfRange: a newer one has
  // taken its place.
  absl::StatusOr<std::optional<Roster>> Entry(int64_t number);
  // Returns the newest entry, or `known` if there is no newer one.
  absl::StatusOr<Roster> Newest(Roster known);
  // Makes entry next.number, which follows an entry that is made, unless it is
  // made already. Returns whether it has made it.
  absl::StatusOr<bool> Propose(const Roster& next);
  // Waits for the entry. DeadlineExceeded may come although the entry is made,
  // since its maker may have ended before it could tell.
  absl::Status Await(int64_t number, absl::Time deadline);

 private:
  std::string SlotOf(int64_t number) const;
  // Returns the entry in the slot, with number -1 if there is none.
  absl::StatusOr<Roster> Read(const std::string& slot);

  Registers* const registers_;
  const int64_t entries_;
};

// The notices of replicas in registers. One thread at a time uses it. Errors
// are those of Registers.
class NoticeBoard {
 public:
  struct Pending {
    std::vector<Notice> notices;
    int64_t seen = 0;
  };

  // `registers` outlives it.
  explicit NoticeBoard(Registers* registers) : registers_(registers) {}

  // Returns the number for a notice to be written. The notice is lost if a
  // roster has seen that number before it is written.
  absl::StatusOr<int64_t> Reserve();
  // May be repeated with the same notice.
  absl::Status Write(int64_t number, const Notice& notice);
  // Returns the notices after number `after`, up to `seen`. Asks again only for
  // those that are missing or invalid. FailedPrecondition: there were more
  // before.
  absl::StatusOr<Pending> ReadAfter(int64_t after);
  // Removes the notices after `after` up to `seen`, which nobody needs.
  void Forget(int64_t after, int64_t seen);

 private:
  Registers* const registers_;
  std::map<int64_t, Notice> known_;
};

struct HeartbeatOptions {
  ReplicaId self;
  int rank = 0;
  int ranks_per_replica = 1;
  absl::Duration interval;
  absl::Duration loss_timeout;
};

// Finds replicas that are silent, by registers that their ranks change. A rank
// listens to the other ranks of its replica and to the rank of its
// number in the others: each is heard by all who could notice its end first, at
// the cost of the sum of the two, not their product. One thread at a time uses
// it. Times are of one clock of this process; others' do not matter. Errors are
// those of Registers.
class Heartbeats {
 public:
  // `registers` outlives it.
  Heartbeats(const HeartbeatOptions& options, Registers* registers)
      : options_(options), registers_(registers) {}

  // Gives a sign of life of this rank if the interval is over.
  absl::Status Beat(absl::Time now);
  // If the interval is over, listens and returns the members with a rank that
  // has not changed its register for loss_timeout. Otherwise returns none.
  absl::StatusOr<std::vector<ReplicaId>> Silent(const Roster& roster,
                                                absl::Time now);
  // To be called if this process could not listen: silence counts anew.
  void Forget();

 private:
  struct Heard {
    std::optional<std::string> beat;
    absl::Time changed;  // when this beat was first heard
  };

  absl::StatusOr<Heard> Listen(const std::string& key, absl::Time now);

  const HeartbeatOptions options_;
  Registers* const registers_;
  int64_t beats_ = 0;
  absl::Time next_beat_ = absl::InfinitePast();
  absl::Time next_listening_ = absl::InfinitePast();
  // By key, for members of the last roster.
  std::map<std::string, Heard> heard_;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_ROSTER_LOG_H_
