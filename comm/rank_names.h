// What texts call the ranks of a group.
#ifndef COMM_RANK_NAMES_H_
#define COMM_RANK_NAMES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp::comm {

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

#endif  // COMM_RANK_NAMES_H_
