// Makes flat parameters of a planned unit's parameters: Sharder with values,
// others to predict it without.
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
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

// Properties that the parameters of one flat parameter share. Trained
// parameters are spread over all shards if nothing frozen lies between them.
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

// Returns the unit's flat parameters in the order in which they are sharded.
std::map<FlatKind, FlatParameters> FlatsOf(const ModuleTree& tree,
                                           const PlannedUnit& planned);

// Returns the layout over `ranks`. InvalidArgument as from
// FlatLayout::Create().
absl::StatusOr<flat_param::FlatLayout> LayoutOf(
    const FlatParameters& parameters, const FlatKind& kind, int ranks);

struct GradientDtypes {
  c10::ScalarType reduced;
  c10::ScalarType of_shard;
};
GradientDtypes GradientDtypesOf(const PlannedUnit& planned,
                                const FlatKind& kind);

// Returns whether any tensor of `parameters` requires grad.
bool AnyTrainable(const FlatParameters& parameters);

// Memory for whole parameters that the ranks of a host share: one allocation
// for each group of ranks, cut into pieces. Ranks of a group make the same
// calls in the same order.
class CommonFlats {
 public:
  // Asks for a piece of `bytes` for `group` and returns its number.
  int Add(std::shared_ptr<comm::Communicator> group, int64_t bytes);

  // Allocates; call it once. Collective. A group whose ranks cannot share
  // memory gets none, and a group of one rank needs none.
  absl::Status Allocate();

  // Returns piece `number`, uint8; undefined if there is none.
  at::Tensor Piece(int number) const;

  // Returns a fence for each group that got memory.
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
