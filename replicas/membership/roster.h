// A roster says who computes which step. It is one entry of the log that all
// replicas follow; these rules make the next entry from it, without clock or
// I/O.
#ifndef REPLICAS_MEMBERSHIP_ROSTER_H_
#define REPLICAS_MEMBERSHIP_ROSTER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::replicas {

// Texts from other ranks are refused beyond these limits.
inline constexpr int kMaxReplicas = 1024;
inline constexpr size_t kMaxRosterBytes = size_t{64} << 10;

// One life of a replica. `incarnation` rises whenever its processes are started
// anew.
struct ReplicaId {
  int replica = 0;      // 0 to kMaxReplicas - 1
  int incarnation = 0;  // not negative

  friend bool operator==(const ReplicaId& a, const ReplicaId& b) {
    return a.replica == b.replica && a.incarnation == b.incarnation;
  }
  friend bool operator!=(const ReplicaId& a, const ReplicaId& b) {
    return !(a == b);
  }
};

// "2.1": replica 2 in its incarnation 1.
std::string ToString(const ReplicaId& id);
// Parses that; nullopt for any other text.
std::optional<ReplicaId> ParseReplicaId(absl::string_view text);

struct Member {
  ReplicaId id;
  // If true, the member takes the training's state from the donor before it
  // computes the step of this roster. Otherwise it has that state.
  bool is_new = false;
};

// Why an entry was made.
enum class Cause {
  kFounded,   // replicas brought their own state; nobody had it before
  kFinished,  // all members had computed the step of the entry before
  kLost,      // members were lost: the others compute the same step again
};

// One entry of the log. If it has members, at least one of them is not new. It
// has none after all who had the state were lost: who is left must request
// again, and a new roster is founded.
struct Roster {
  int64_t number = -1;  // of the entry: 0, 1, 2, ..., each once
  // 0 in entry 0; one more than in the entry before if the set of members
  // differs, otherwise the same.
  int64_t epoch = -1;
  int64_t step = 0;  // the step that its members compute
  // Notices up to this number are taken into account.
  int64_t notices_seen = 0;
  Cause cause = Cause::kFounded;
  std::vector<Member> members;  // by rising replica
};

// Returns the member of that replica, of any incarnation, or null.
const Member* FindMember(const Roster& roster, int replica);
// Returns the index of that replica, which must be a member.
inline int IndexOf(const Roster& roster, int replica) {
  return static_cast<int>(FindMember(roster, replica) - roster.members.data());
}
inline bool IsMember(const Roster& roster, const ReplicaId& id) {
  const Member* const member = FindMember(roster, id.replica);
  return member != nullptr && member->id == id;
}
// Returns who gives its state to all new members: the lowest member that is not
// new, or null if there are no members. After a founding it is the member that
// brought the state of the largest step, and all others are new.
const Member* Donor(const Roster& roster);

// A message of a replica to the others. Notices are numbered from 1, in the
// order in which they are made.
struct Notice {
  enum class Kind { kJoin, kLeave };
  Kind kind = Kind::kJoin;
  ReplicaId id;
  // With kJoin: the step that it could compute next with the state it brings.
  int64_t first_step = 0;
};

// The rules. `pending` are the notices after `roster.notices_seen` up to number
// `seen`, in order; one that was never written may be missing.
//
// A leave ends its incarnation: no join of it in `pending` counts, before or
// after the leave. A notice of a larger incarnation ends all smaller ones.

// Returns the joins that count, at most one per replica, by rising replica.
std::vector<Notice> Waiting(absl::Span<const Notice> pending);
// Returns the members that have left or have a larger incarnation.
std::vector<ReplicaId> Gone(const Roster& roster,
                            absl::Span<const Notice> pending);

// Returns the first roster, or that after one without members. `pending` has a
// join that counts. The step is the largest with which one of them can begin.
Roster Found(const Roster& before, absl::Span<const Notice> pending,
             int64_t seen);
// Returns the roster after all members of `roster`, which has some, have
// computed its step: without those that are gone, with those who wait as new
// ones. If all old ones are gone, it has no members, and has seen no new
// notices.
Roster AfterStep(const Roster& roster, absl::Span<const Notice> pending,
                 int64_t seen);
// Returns the roster of the same step without `gone`, at least one of which is
// a member. Nobody joins, since somebody who computes would have to hand over
// the state. If only new members are left, it has none.
Roster Without(const Roster& roster, absl::Span<const ReplicaId> gone);

// The text of a roster or a notice, and back; each has exactly one text.
// InvalidArgument: any other text, also of a roster that no rule makes.
std::string Encode(const Roster& roster);
absl::StatusOr<Roster> DecodeRoster(absl::string_view text);
std::string Encode(const Notice& notice);
absl::StatusOr<Notice> DecodeNotice(absl::string_view text);

// Returns text for people: "entry 7 (step 3, epoch 2, lost): 0.1 2.0(new)".
std::string Describe(const Roster& roster);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_ROSTER_H_
