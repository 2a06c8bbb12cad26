// Which replicas are silent, by registers that their ranks change.
#ifndef REPLICAS_MEMBERSHIP_HEARTBEATS_H_
#define REPLICAS_MEMBERSHIP_HEARTBEATS_H_

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

struct HeartbeatOptions {
  ReplicaId self;
  int rank = 0;
  int ranks_per_replica = 1;
  absl::Duration interval;
  absl::Duration loss_timeout;
};

// A rank listens to the other ranks of its replica and to its own like in the
// other replicas: each rank is heard by all who could notice its end first, and
// asking costs the sum of the two, not their product. Used by one thread at a
// time. Times are of one clock of this process; others' clocks do not matter.
// Errors are those of Registers.
class Heartbeats {
 public:
  // `registers` outlives it.
  Heartbeats(const HeartbeatOptions& options, Registers* registers)
      : options_(options), registers_(registers) {}

  // Lets hear of this rank where the interval is over.
  absl::Status Beat(absl::Time now);
  // Listens where the interval is over: the members of which one rank has been
  // listened to for loss_timeout without a change. Else nobody is silent.
  absl::StatusOr<std::vector<ReplicaId>> Silent(const Roster& roster,
                                                absl::Time now);
  // This process could not listen: nobody counts as silent until now.
  void Forget();

 private:
  struct Heard {
    std::optional<std::string> beat;
    absl::Time changed;  // when that was heard first
  };

  absl::StatusOr<Heard> Listen(const std::string& key, absl::Time now);

  const HeartbeatOptions options_;
  Registers* const registers_;
  int64_t beats_ = 0;
  absl::Time next_beat_ = absl::InfinitePast();
  absl::Time next_listening_ = absl::InfinitePast();
  // By key; only members of the last roster.
  std::map<std::string, Heard> heard_;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_HEARTBEATS_H_
