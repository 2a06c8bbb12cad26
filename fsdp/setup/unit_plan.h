// Decides which unit of a model owns which parameter. A unit is a module whose
// parameters are gathered, freed and reduced together. Pure data: no torch.
#ifndef FSDP_SETUP_UNIT_PLAN_H_
#define FSDP_SETUP_UNIT_PLAN_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace fsdp {

// One place of the module tree. A module that is registered under several
// parents has a place for each, all with the same identity.
struct ModuleNode {
  std::string path;  // "blocks.0", "" for the root
  int parent;        // index of a node, -1 for the root
  bool is_unit;
  int identity;  // of the module object
};

// A parameter registered in a module. Uses with the same `parameter` are tied.
struct ParameterUse {
  int module;        // index of a node
  std::string name;  // full, without wrappers: "blocks.0.qkv.weight"
  int parameter;     // identity of the tensor
};

struct OwnedParameter {
  int parameter;
  std::vector<std::string> names;  // in order of use; the first is canonical
};

struct Unit {
  std::string name;  // path of its module where that first appears
  int module;        // index of that node
  // Index of the innermost unit that surrounds every place of this one, which
  // is smaller than the unit's own; -1 for the root.
  int parent;
  std::vector<OwnedParameter> parameters;  // in order of first use; may be none
};

// Returns the name of a unit in messages: its path, or "root".
std::string DisplayName(const Unit& unit);

// Gives each parameter to the innermost unit that surrounds all its uses, at
// every place of the modules that use it, so that it is gathered whenever one
// of them runs. Returns the units in pre-order, the root first, also those
// that own nothing.
//
// `modules` are in pre-order, and the first is the root and a unit. Nodes of
// one module agree on being a unit, and none is inside itself. `uses` are in
// the order in which parameters will lie in their unit. A shared module's uses
// may be listed for one or for all of its places. InvalidArgument: there are
// none.
absl::StatusOr<std::vector<Unit>> PlanUnits(
    absl::Span<const ModuleNode> modules, absl::Span<const ParameterUse> uses);

}  // namespace fsdp

#endif  // FSDP_SETUP_UNIT_PLAN_H_
