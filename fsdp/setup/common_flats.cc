#include "fsdp/setup/common_flats.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/fence.h"

namespace fsdp {
namespace {

// Pieces begin on cache lines of their own.
constexpr int64_t kAlignment = 64;

}  // namespace

int CommonFlats::Add(std::shared_ptr<comm::Communicator> group, int64_t bytes) {
  auto found = std::find_if(
      groups_.begin(), groups_.end(),
      [&](const Group& other) { return other.communicator == group; });
  if (found == groups_.end()) {
    groups_.emplace_back().communicator = std::move(group);
    found = std::prev(groups_.end());
  }
  ranges_.push_back(
      {static_cast<size_t>(found - groups_.begin()), found->bytes, bytes});
  found->bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return static_cast<int>(ranges_.size()) - 1;
}

absl::Status CommonFlats::Allocate() {
  for (Group& group : groups_) {
    if (group.communicator->world_size() == 1) continue;  // a shard is all
    if (!group.communicator->HasCommonMemory()) continue;
    FSDP_ASSIGN_OR_RETURN(group.common,
                          group.communicator->AllocateCommon(group.bytes));
  }
  return absl::OkStatus();
}

at::Tensor CommonFlats::Piece(int number) const {
  const Range& range = ranges_[number];
  const at::Tensor& memory = groups_[range.group].common.memory;
  if (!memory.defined()) return at::Tensor();
  return memory.narrow(0, range.begin, range.bytes);
}

std::vector<std::unique_ptr<comm::Fence>> CommonFlats::TakeFences() {
  std::vector<std::unique_ptr<comm::Fence>> fences;
  for (Group& group : groups_) {
    if (group.common.fence != nullptr) {
      fences.push_back(std::move(group.common.fence));
    }
  }
  return fences;
}

}  // namespace fsdp
