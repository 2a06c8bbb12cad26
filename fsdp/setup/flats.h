// How the parameters of a planned unit become flat parameters: what Sharder
// does with values, and others predict without.
#ifndef FSDP_SETUP_FLATS_H_
#define FSDP_SETUP_FLATS_H_

#include <c10/core/ScalarType.h>

#include <map>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
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

}  // namespace fsdp

#endif  // FSDP_SETUP_FLATS_H_
