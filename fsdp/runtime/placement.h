// Where a unit lies: the groups of ranks that it is sharded, replicated and
// gathered over.
#ifndef FSDP_RUNTIME_PLACEMENT_H_
#define FSDP_RUNTIME_PLACEMENT_H_

#include <memory>

#include "comm/communicator.h"
#include "comm/quantized/quantized_communicator.h"

namespace fsdp {

// The groups of ranks a unit lies on.
struct Placement {
  // What the unit is sharded over; of one rank: it is not.
  std::shared_ptr<comm::Communicator> shard;
  // All-reduces what has been reduce-scattered; null: nothing is replicated.
  std::shared_ptr<comm::Communicator> replicate;
  // Consecutive ranks of `shard` that gather after kShrink; null: none do.
  std::shared_ptr<comm::Communicator> part;
  // `shard` again, sending int8 as `quantization` says: what gathers parameters
  // and reduces gradients in training; null: `shard` does.
  std::shared_ptr<comm::Communicator> quantized = nullptr;
  comm::QuantizationOptions quantization = {};

  comm::Communicator& traffic() const {
    return quantized != nullptr ? *quantized : *shard;
  }
  // Whether the unit's gradients are those of this rank.
  bool is_alone() const {
    return shard->world_size() == 1 && replicate == nullptr;
  }
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_PLACEMENT_H_
