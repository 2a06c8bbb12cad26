// What a checkpoint of PyTorch's Distributed Checkpoint (DCP) says it has.
#ifndef CHECKPOINT_DCP_METADATA_H_
#define CHECKPOINT_DCP_METADATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/tensor/boxes.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint {

// Where a value stands in the state dict: keys, and indices of lists.
using DcpPath = std::vector<std::variant<std::string, int64_t>>;
// "model.layers.0.weight", as DCP names it.
std::string DcpName(const DcpPath& path);

// A torch.save() file inside of a file.
struct DcpPlace {
  int file = 0;  // of DcpMetadata::files
  int64_t offset = 0;
  int64_t length = 0;
};

struct DcpChunk {
  Box box;
  DcpPlace place;
};

struct DcpTensor {
  TensorInfo info;
  std::vector<DcpChunk> chunks;  // those with elements
};

struct DcpMetadata {
  std::vector<std::string> files;  // relative to the checkpoint's folder
  std::vector<DcpTensor> tensors;
  std::vector<std::pair<std::string, DcpPlace>> values;  // no tensors, by name
  std::vector<std::pair<std::string, DcpPath>> paths;    // by name
  std::string version;                                   // "" for none
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_DCP_METADATA_H_
