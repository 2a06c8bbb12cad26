// Names of collectives, calls and ranks, as errors and traces give them.
#ifndef COMM_CALL_H_
#define COMM_CALL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::comm {

enum class Collective {
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllReduce,
  kBroadcast,
  kSplit,
};

// Returns a name such as "all-gather".
absl::string_view CollectiveName(Collective collective);

enum class ReduceOp { kSum, kMin, kMax };

absl::string_view ReduceOpName(ReduceOp op);

// One rank's call of a collective, as ranks compare it and errors name it.
struct Call {
  Collective collective = Collective::kAllGather;
  std::string label;   // "blocks.2"
  std::string dtype;   // "float32"; empty where no tensor is involved
  int64_t count = 0;   // elements of one rank's shard, or of the whole tensor
  std::string detail;  // "sum", "root 2"; empty where there is nothing to say
};

bool operator==(const Call& a, const Call& b);
inline bool operator!=(const Call& a, const Call& b) { return !(a == b); }

// For people: "all-gather of blocks.2 (float32 x 1024)".
std::string ToString(const Call& call);

// Returns "all-gather #17 of blocks.2"; `sequence` counts a group's calls from
// 0.
std::string Name(const Call& call, int64_t sequence);

// The names that texts give to the ranks of a group. Whoever reads an error has
// to find the process: where the group is a part of the world, a name has the
// rank in the world, too. Cheap to copy.
class RankNames {
 public:
  RankNames() : RankNames(1) {}

  // Names the ranks of a world of `size` > 0 ranks.
  explicit RankNames(int size);

  // Names the ranks of a group. `world_ranks` has the rank in the world of each
  // of them, or kNobodyKnows; empty, it says that the group is the world.
  // InvalidArgument: it has another size than `size`.
  static absl::StatusOr<RankNames> Of(int size, std::vector<int> world_ranks);
  static constexpr int kNobodyKnows = -1;

  // Names a group of `members` of this group, in their order. The names stay
  // the same if these are all its ranks in its own order.
  RankNames Part(absl::Span<const int> members) const;

  int size() const { return size_; }
  int world_rank(int rank) const;

  // These return "rank 1", "rank 1 of 4" and "ranks 1, 3", in a part of the
  // world followed by " (world rank 5)" or " (world ranks 5, 7)".
  std::string Name(int rank) const;
  std::string Place(int rank) const;
  std::string List(absl::Span<const int> ranks) const;
  // Returns "rank 5", or in a part of the world "world rank 5". The rank need
  // not be in the group.
  std::string NameInWorld(int world_rank) const;

  // Returns `text`, which comes from a group of some of these ranks, with the
  // Name() and Place() of this group for each one that has a world rank.
  std::string Adopt(absl::string_view text) const;

 private:
  RankNames(int size, std::shared_ptr<const std::vector<int>> world_ranks);

  std::string Suffix(int rank) const;  // " (world rank 5)", or empty
  int RankOf(int world_rank) const;    // -1: it is not in the group

  int size_;
  std::shared_ptr<const std::vector<int>> world_ranks_;  // null: the world
};

}  // namespace fsdp::comm

#endif  // COMM_CALL_H_
