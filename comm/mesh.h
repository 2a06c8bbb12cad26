// The ranks of a group arranged in one or two named dimensions.
#ifndef COMM_MESH_H_
#define COMM_MESH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"

namespace fsdp::comm {

struct MeshDimension {
  std::string name;
  int size;  // -1, for at most one dimension: what the other one leaves
};

// Row-major: the last dimension varies fastest, so that its groups are
// consecutive ranks. {{"replicate", 2}, {"shard", 3}} of 6 ranks:
//
//   group along "shard":      0 1 2   and   3 4 5
//   group along "replicate":  0 3,    1 4   and   2 5
//
// Copies refer to the same groups.
class Mesh {
 public:
  // Collective over `world`. InvalidArgument on all ranks alike: not one or two
  // dimensions, empty or equal names, sizes that do not multiply to the world
  // size, or ranks that pass different dimensions.
  static absl::StatusOr<Mesh> Create(std::shared_ptr<Communicator> world,
                                     std::vector<MeshDimension> dimensions);

  const std::shared_ptr<Communicator>& world() const { return world_; }
  int num_dimensions() const { return static_cast<int>(axes_.size()); }

  // With its size filled in.
  const MeshDimension& dimension(int i) const { return axes_[i].dimension; }
  // The ranks that differ from this one in dimension `i` only, ordered by their
  // coordinate: group(i)->rank() == coordinate(i). The world itself where that
  // is all ranks.
  const std::shared_ptr<Communicator>& group(int i) const {
    return axes_[i].group;
  }
  int coordinate(int i) const { return axes_[i].group->rank(); }

  // Aborts the world and this rank's groups: none of them knows of the others.
  void Abort(const absl::Status& reason) const;

  // For people: dimensions and which ranks share a group.
  std::string ToString() const;

 private:
  struct Axis {
    MeshDimension dimension;
    int stride;  // between the world ranks of neighbours
    std::shared_ptr<Communicator> group;
  };

  Mesh() = default;
  // Makes the groups of `axes_`.
  absl::Status Split();
  std::string DescribeGroups(const Axis& axis) const;

  std::shared_ptr<Communicator> world_;
  std::vector<Axis> axes_;
};

// This rank's group of `size` consecutive ranks of `group`; `group` itself
// where that is all of them. Collective. InvalidArgument on all ranks alike:
// `size` does not divide the number of ranks, or differs between them.
absl::StatusOr<std::shared_ptr<Communicator>> SplitConsecutive(
    const std::shared_ptr<Communicator>& group, int size);

}  // namespace fsdp::comm

#endif  // COMM_MESH_H_
