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

// One dimension of a mesh.
struct MeshDimension {
  std::string name;  // "shard"; not empty, and no other dimension's
  int size;  // ranks; -1, in one dimension at most: all that the other leaves
};

// Ranks in one or two dimensions, in row-major order: the last dimension varies
// fastest, so that its groups are consecutive ranks. {{"replicate", 2},
// {"shard", 3}} of 6 ranks makes
//
//   group along "shard":      0 1 2   and   3 4 5
//   group along "replicate":  0 3,    1 4   and   2 5
//
// Copies refer to the same groups.
class Mesh {
 public:
  // Makes the groups. Collective over `world`. InvalidArgument on all ranks:
  // there are not one or two dimensions, names are empty or equal, the sizes do
  // not multiply to the world size, or the ranks pass different dimensions.
  static absl::StatusOr<Mesh> Create(std::shared_ptr<Communicator> world,
                                     std::vector<MeshDimension> dimensions);

  // The group that the mesh was made of.
  const std::shared_ptr<Communicator>& world() const { return world_; }
  // Returns 1 or 2.
  int num_dimensions() const { return static_cast<int>(axes_.size()); }

  // A size that was -1 is filled in.
  const MeshDimension& dimension(int i) const { return axes_[i].dimension; }
  // The group of the ranks that differ from this one in dimension `i` only,
  // ordered by their coordinate: group(i)->rank() == coordinate(i). Where these
  // are all ranks it is the world itself.
  const std::shared_ptr<Communicator>& group(int i) const {
    return axes_[i].group;
  }
  // The place of this rank in dimension `i`, from 0 on.
  int coordinate(int i) const { return axes_[i].group->rank(); }

  // Aborts the world and this rank's groups, which know nothing of each other.
  void Abort(const absl::Status& reason) const;

  // For people: the dimensions, and which ranks share a group.
  std::string ToString() const;

 private:
  struct Axis {
    MeshDimension dimension;
    int stride;  // between the world ranks of neighbours
    std::shared_ptr<Communicator> group;
  };

  Mesh() = default;
  std::string DescribeGroups(const Axis& axis) const;

  std::shared_ptr<Communicator> world_;
  std::vector<Axis> axes_;
};

// Returns this rank's group of `size` consecutive ranks of `group`, or `group`
// itself where these are all its ranks. Collective. InvalidArgument on all
// ranks: `size` does not divide their number or differs between them.
absl::StatusOr<std::shared_ptr<Communicator>> SplitConsecutive(
    const std::shared_ptr<Communicator>& group, int size);

}  // namespace fsdp::comm

#endif  // COMM_MESH_H_
