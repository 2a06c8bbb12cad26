// Finds replicas that are silent, by registers that their ranks change.
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

// A rank listens to the other ranks of its replica and to the rank of its
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

#endif  // REPLICAS_MEMBERSHIP_HEARTBEATS_H_
