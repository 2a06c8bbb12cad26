// The groups of ranks that units with different strategies lie on.
#ifndef FSDP_PLACEMENTS_H_
#define FSDP_PLACEMENTS_H_

#include <map>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/options.h"
#include "fsdp/runtime.h"

namespace fsdp {

// Splits each group once, however many units lie on it.
class Placements {
 public:
  explicit Placements(const comm::Mesh& mesh) : mesh_(mesh) {}

  // Collective, in the same order on all ranks. `options` have been checked.
  absl::StatusOr<Placement> Of(const UnitOptions& options);

 private:
  using Group = std::shared_ptr<comm::Communicator>;

  absl::StatusOr<Group> Split(const Group& group, int size);

  const comm::Mesh mesh_;
  std::map<std::pair<const void*, int>, Group> split_;
};

}  // namespace fsdp

#endif  // FSDP_PLACEMENTS_H_
