// The vocabulary of collectives: which there are, and what one rank asks for.
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

// "all-gather".
absl::string_view CollectiveName(Collective collective);

enum class ReduceOp { kSum, kMin, kMax };

// "sum".
absl::string_view ReduceOpName(ReduceOp op);

// One rank's call, in the form in which ranks compare theirs and errors name
// it.
struct Call {
  Collective collective = Collective::kAllGather;
  std::string label;   // "blocks.2"
  std::string dtype;   // "float32"; empty where no tensor is involved
  int64_t count = 0;   // elements of one rank's shard, or of the whole tensor
  std::string detail;  // "sum", "root 2"; empty where there is nothing to say
};

bool operator==(const Call& a, const Call& b);
inline bool operator!=(const Call& a, const Call& b) { return !(a == b); }

// "all-gather of blocks.2 (float32 x 1024)".
std::string ToString(const Call& call);

// "all-gather #17 of blocks.2": `sequence` counts a group's calls from 0.
std::string Name(const Call& call, int64_t sequence);

// What texts call the ranks of a group.

// Whoever reads an error has to find the process: of a group that is a part of
// another one, names say the rank in the world, too. Cheap to copy.
class RankNames {
 public:
  // Of the only rank there is.
  RankNames() : RankNames(1) {}

  // Of the world: `size` > 0 ranks.
  explicit RankNames(int size);

  // Of a group of `size` ranks which are `world_ranks` of the world, by rank,
  // kNobodyKnows where that is so; of the world where it is empty.
  // InvalidArgument: it is not of that size.
  static absl::StatusOr<RankNames> Of(int size, std::vector<int> world_ranks);
  static constexpr int kNobodyKnows = -1;

  // Of those of this group's ranks, in their order; of all in the order of this
  // group they are this group's.
  RankNames Part(absl::Span<const int> members) const;

  int size() const { return size_; }
  int world_rank(int rank) const;

  // "rank 1", or "rank 1 (world rank 5)".
  std::string Name(int rank) const;
  // "rank 1 of 4", or "rank 1 of 4 (world rank 5)".
  std::string Place(int rank) const;
  // "rank 1", "ranks 1, 3", or "ranks 1, 3 (world ranks 5, 7)".
  std::string List(absl::Span<const int> ranks) const;
  // Of a rank that need not be in the group: "rank 5", or "world rank 5".
  std::string NameInWorld(int world_rank) const;

  // `text` of a group of some of these ranks: what it calls them by name and
  // place is what this group does.
  std::string Adopt(absl::string_view text) const;

 private:
  RankNames(int size, std::shared_ptr<const std::vector<int>> world_ranks);

  // " (world rank 5)".
  std::string Suffix(int rank) const;
  int RankOf(int world_rank) const;  // -1: nobody's

  int size_;
  std::shared_ptr<const std::vector<int>> world_ranks_;  // null: the world
};

}  // namespace fsdp::comm

#endif  // COMM_CALL_H_
