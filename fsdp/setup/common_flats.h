// Memory that the ranks of a host have in common for unsharded parameters.
#ifndef FSDP_SETUP_COMMON_FLATS_H_
#define FSDP_SETUP_COMMON_FLATS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "comm/communicator.h"
#include "comm/fence.h"

namespace fsdp {

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

#endif  // FSDP_SETUP_COMMON_FLATS_H_
