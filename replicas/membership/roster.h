// Who computes which step: one entry of the log that all replicas follow, and
// the rules by which the next one is made of it. No clock, no I/O.
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

// What comes from others is refused beyond these.
inline constexpr int kMaxReplicas = 1024;
inline constexpr size_t kMaxRosterBytes = size_t{64} << 10;

// One life of a replica: `incarnation` rises whenever its processes are
// started anew.
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
// Back; nullopt for all else.
std::optional<ReplicaId> ParseReplicaId(absl::string_view text);

struct Member {
  ReplicaId id;
  // Takes the training's state from the donor before it computes the step of
  // this roster. One that is not holds the state that this step begins with.
  bool is_new = false;
};

// Why an entry was made.
enum class Cause {
  kFounded,   // of replicas that bring their own state; nobody had it before
  kFinished,  // all members had computed the step of the entry before
  kLost,      // members went away: the others compute the same step again
};

// One entry of the log. Where it has members, one of them at least is not new.
// It has none after all who held the state went away: who is left then has to
// request again, and a new roster is founded.
struct Roster {
  int64_t number = -1;  // of the entry: 0, 1, 2, ... Never two with the same
  // One more than in the entry before exactly when the set of members is
  // another one; 0 in entry 0.
  int64_t epoch = -1;
  int64_t step = 0;  // what its members compute
  // Notices up to here have been taken into account.
  int64_t notices_seen = 0;
  Cause cause = Cause::kFounded;
  std::vector<Member> members;  // by rising replica
};

bool operator==(const Roster& a, const Roster& b);
inline bool operator!=(const Roster& a, const Roster& b) { return !(a == b); }

// The member of that replica, of whatever incarnation; null: it has none.
const Member* FindMember(const Roster& roster, int replica);
// Where that one is among the members: it is one.
inline int IndexOf(const Roster& roster, int replica) {
  return static_cast<int>(FindMember(roster, replica) - roster.members.data());
}
inline bool IsMember(const Roster& roster, const ReplicaId& id) {
  const Member* const member = FindMember(roster, id.replica);
  return member != nullptr && member->id == id;
}
// Who gives its state to all new members: the lowest one that is not new; null
// exactly where there are no members. After a founding that is the member that
// brought the state of the largest step, and all others are new.
const Member* Donor(const Roster& roster);

// What a replica lets the others know. Notices are numbered from 1 on, in the
// order in which they were made.
struct Notice {
  enum class Kind { kJoin, kLeave };
  Kind kind = Kind::kJoin;
  ReplicaId id;
  // kJoin: what it could compute next with the state that it brings.
  int64_t first_step = 0;
};

// The rules. `pending` are the notices after `roster.notices_seen`, up to and
// including number `seen`, in order; one may be missing that was never written.
//
// A leave ends its incarnation: neither a join before nor one after it in
// `pending` counts. A notice of a larger incarnation ends all smaller ones.

// Joins that count: at most one per replica, by rising replica.
std::vector<Notice> Waiting(absl::Span<const Notice> pending);
// Members that have left, or of which there is a larger incarnation.
std::vector<ReplicaId> Gone(const Roster& roster,
                            absl::Span<const Notice> pending);

// The first roster, or that after one without members; `pending` has a join
// that counts. Its step is the largest that one of them can begin with.
Roster Found(const Roster& before, absl::Span<const Notice> pending,
             int64_t seen);
// After the step of `roster`, which has members, was computed by all of them.
// Members that are gone are left out, who waits is a new member. Without
// members, and with nothing seen, where all old ones are gone.
Roster AfterStep(const Roster& roster, absl::Span<const Notice> pending,
                 int64_t seen);
// The same step without those of `gone`, of which one at least is a member.
// Nobody joins here: who waits has to be given the state by somebody who would
// have to compute meanwhile. Without members where only new ones are left.
Roster Without(const Roster& roster, absl::Span<const ReplicaId> gone);

// As text, and back, exactly: the same roster has one text only.
// InvalidArgument for all else, also for what no rule makes.
std::string Encode(const Roster& roster);
absl::StatusOr<Roster> DecodeRoster(absl::string_view text);
std::string Encode(const Notice& notice);
absl::StatusOr<Notice> DecodeNotice(absl::string_view text);

// For people: "entry 7 (step 3, epoch 2, lost): 0.1 2.0(new)".
std::string Describe(const Roster& roster);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_ROSTER_H_
