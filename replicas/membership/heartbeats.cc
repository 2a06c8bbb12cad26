#include "replicas/membership/heartbeats.h"

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {
namespace {

std::string KeyOf(const ReplicaId& id, int rank) {
  return absl::StrCat("membership/beat/", ToString(id), "/", rank);
}

}  // namespace

absl::Status Heartbeats::Beat(absl::Time now) {
  if (now < next_beat_) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(registers_->Set(KeyOf(options_.self, options_.rank),
                                       absl::StrCat(++beats_)));
  next_beat_ = now + options_.interval;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ReplicaId>> Heartbeats::Silent(const Roster& roster,
                                                          absl::Time now) {
  std::vector<ReplicaId> silent;
  if (now < next_listening_) return silent;
  std::map<std::string, Heard> heard;
  for (const Member& member : roster.members) {
    bool is_silent = false;
    for (int rank = 0; rank < options_.ranks_per_replica; ++rank) {
      const bool is_own_replica = member.id == options_.self;
      if (is_own_replica == (rank == options_.rank)) continue;
      const std::string key = KeyOf(member.id, rank);
      FSDP_ASSIGN_OR_RETURN(const Heard latest, Listen(key, now));
      heard[key] = latest;
      is_silent |= now - latest.changed >= options_.loss_timeout;
    }
    if (is_silent) silent.push_back(member.id);
  }
  heard_ = std::move(heard);
  next_listening_ = now + options_.interval;
  return silent;
}

absl::StatusOr<Heartbeats::Heard> Heartbeats::Listen(const std::string& key,
                                                     absl::Time now) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> beat,
                        registers_->Get(key));
  const auto before = heard_.find(key);
  if (before != heard_.end() && before->second.beat == beat) {
    return before->second;
  }
  return Heard{beat, now};
}

void Heartbeats::Forget() {
  heard_.clear();
  next_beat_ = absl::InfinitePast();
  next_listening_ = absl::InfinitePast();
}

}  // namespace fsdp::replicas
