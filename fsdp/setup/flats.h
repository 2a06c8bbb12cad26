// How the parameters of a planned unit become flat parameters: what Sharder
// does with values, and others predict without.
#ifndef FSDP_SETUP_FLATS_H_
#define FSDP_SETUP_FLATS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

// What parameters of one flat parameter have in common. What is trained is
// spread over all shards where nothing frozen lies between.
struct FlatKind {
  c10::ScalarType stored;
  c10::ScalarType computed;
  bool frozen;

  friend bool operator<(const FlatKind& a, const FlatKind& b) {
    return std::tie(a.stored, a.computed, a.frozen) <
           std::tie(b.stored, b.computed, b.frozen);
  }
};

using FlatParameters = std::vector<flat_param::NamedParameter>;

// In the order in which they are sharded.
std::map<FlatKind, FlatParameters> FlatsOf(const ModuleTree& tree,
                                           const PlannedUnit& planned);

// Over `ranks`. InvalidArgument as FlatLayout::Create().
absl::StatusOr<flat_param::FlatLayout> LayoutOf(
    const FlatParameters& parameters, const FlatKind& kind, int ranks);

struct GradientDtypes {
  c10::ScalarType reduced;
  c10::ScalarType of_shard;
};
GradientDtypes GradientDtypesOf(const PlannedUnit& planned,
                                const FlatKind& kind);

// Whether any tensor of these requires grad.
bool AnyTrainable(const FlatParameters& parameters);

// Memory that the ranks of a host have in common for unsharded parameters.

// One allocation for each group of ranks, cut into pieces. Ranks of a group
// make the same calls in the same order.
class CommonFlats {
 public:
  // Asks for a piece of `bytes` for `group` and returns its number.
  int Add(std::shared_ptr<comm::Communicator> group, int64_t bytes);

  // Collective, once. A group whose ranks have no memory in common gets none,
  // and one of a single rank needs none.
  absl::Status Allocate();

  // Piece `number`, uint8; undefined where there is none.
  at::Tensor Piece(int number) const;

  // One for each group that got memory.
  std::vector<std::unique_ptr<comm::Fence>> TakeFences();

 private:
  struct Group {
    std::shared_ptr<comm::Communicator> communicator;
    int64_t bytes = 0;
    comm::CommonMemory common;
  };
  struct Range {
    size_t group;
    int64_t begin;
    int64_t bytes;
  };

  std::vector<Group> groups_;
  std::vector<Range> ranges_;
};

}  // namespace fsdp

#endif  // FSDP_SETUP_FLATS_H_
