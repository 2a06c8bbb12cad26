#include "comm/mesh.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/agreement.h"

namespace fsdp::comm {
namespace {

constexpr int kMaxListed = 4;

std::string Describe(const std::vector<MeshDimension>& dimensions) {
  return absl::StrJoin(
      dimensions, " x ", [](std::string* out, const MeshDimension& dimension) {
        absl::StrAppend(out, dimension.name, " ", dimension.size);
      });
}

absl::Status Refuse(absl::string_view what, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(what, ": ", why));
}

absl::Status CheckNames(absl::string_view what,
                        const std::vector<MeshDimension>& dimensions) {
  if (dimensions.empty() || dimensions.size() > 2) {
    return Refuse(what, absl::StrCat("there are ", dimensions.size(),
                                     " dimensions; pass one or two"));
  }
  for (const MeshDimension& dimension : dimensions) {
    if (dimension.name.empty()) return Refuse(what, "a name is empty");
  }
  if (dimensions.front().name == dimensions.back().name &&
      dimensions.size() > 1) {
    return Refuse(what, "the names are equal");
  }
  return absl::OkStatus();
}

// Fills in a size of -1.
absl::Status ResolveSizes(absl::string_view what, int world_size,
                          std::vector<MeshDimension>& dimensions) {
  int64_t product = 1;
  MeshDimension* open = nullptr;
  for (MeshDimension& dimension : dimensions) {
    if (dimension.size > 0) {
      product *= dimension.size;
    } else if (dimension.size == -1 && open == nullptr) {
      open = &dimension;
    } else {
      return Refuse(what, "sizes are positive; one of them may be -1");
    }
  }
  if (open != nullptr && world_size % product == 0) {
    open->size = static_cast<int>(world_size / product);
    return absl::OkStatus();
  }
  if (open == nullptr && product == world_size) return absl::OkStatus();
  return Refuse(
      what,
      absl::StrCat(product, open == nullptr ? " is not" : " does not divide",
                   " the number of ranks, ", world_size));
}

std::string RankList(int first, int count, int stride) {
  const int last = first + (count - 1) * stride;
  std::vector<std::string> parts;
  if (count <= kMaxListed) {
    for (int i = 0; i < count; ++i) {
      parts.push_back(absl::StrCat(first + i * stride));
    }
  } else {
    parts = {absl::StrCat(first), absl::StrCat(first + stride), "...",
             absl::StrCat(last)};
  }
  return absl::StrCat("{", absl::StrJoin(parts, " "), "}");
}

}  // namespace

absl::StatusOr<Mesh> Mesh::Create(std::shared_ptr<Communicator> world,
                                  std::vector<MeshDimension> dimensions) {
  const std::string what =
      absl::StrCat("mesh of ", Describe(dimensions), " ranks");
  FSDP_RETURN_IF_ERROR(CheckSame(*world, Describe(dimensions),
                                 "mesh dimensions",
                                 absl::Now() + world->default_timeout()));
  // Every rank has the same dimensions, so all refuse the same.
  FSDP_RETURN_IF_ERROR(CheckNames(what, dimensions));
  FSDP_RETURN_IF_ERROR(ResolveSizes(what, world->world_size(), dimensions));

  Mesh mesh;
  mesh.world_ = std::move(world);
  int stride = mesh.world_->world_size();
  for (MeshDimension& dimension : dimensions) {
    stride /= dimension.size;
    mesh.axes_.push_back({std::move(dimension), stride, nullptr});
  }
  const int rank = mesh.world_->rank();
  for (Axis& axis : mesh.axes_) {
    if (axis.dimension.size == mesh.world_->world_size()) {
      axis.group = mesh.world_;
      continue;
    }
    const int coordinate = rank / axis.stride % axis.dimension.size;
    // The color is the lowest rank of the group, which is unique to it.
    FSDP_ASSIGN_OR_RETURN(
        axis.group,
        mesh.world_->Split(/*color=*/rank - coordinate * axis.stride,
                           /*key=*/coordinate));
  }
  return mesh;
}

void Mesh::Abort(const absl::Status& reason) const {
  world_->Abort(reason);
  for (const Axis& axis : axes_) axis.group->Abort(reason);
}

std::string Mesh::ToString() const {
  std::vector<MeshDimension> dimensions;
  std::string groups;
  for (const Axis& axis : axes_) {
    dimensions.push_back(axis.dimension);
    absl::StrAppend(&groups, "\n  ", axis.dimension.name, ": ",
                    DescribeGroups(axis));
  }
  return absl::StrCat(Describe(dimensions), " ranks, this is ",
                      world_->names().Name(world_->rank()), groups);
}

std::string Mesh::DescribeGroups(const Axis& axis) const {
  std::vector<std::string> groups;
  const int num_groups = world_->world_size() / axis.dimension.size;
  for (int i = 0; i < std::min(num_groups, kMaxListed); ++i) {
    const int first = axis.stride == 1 ? i * axis.dimension.size : i;
    groups.push_back(RankList(first, axis.dimension.size, axis.stride));
  }
  if (num_groups > kMaxListed) {
    groups.push_back(absl::StrCat("... (", num_groups, " groups)"));
  }
  return absl::StrJoin(groups, " ");
}

absl::StatusOr<std::shared_ptr<Communicator>> SplitConsecutive(
    const std::shared_ptr<Communicator>& group, int size) {
  FSDP_RETURN_IF_ERROR(CheckSame(*group, absl::StrCat(size), "group sizes",
                                 absl::Now() + group->default_timeout()));
  const int num_ranks = group->world_size();
  if (size < 1 || num_ranks % size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("groups of ", size, " consecutive ranks: ", size,
                     " does not divide the number of ranks, ", num_ranks));
  }
  if (size == num_ranks) return group;
  FSDP_ASSIGN_OR_RETURN(
      std::shared_ptr<Communicator> part,
      group->Split(/*color=*/group->rank() / size, /*key=*/group->rank()));
  return part;
}

}  // namespace fsdp::comm
