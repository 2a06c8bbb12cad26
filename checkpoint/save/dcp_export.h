// A run's tensors as a checkpoint of PyTorch's Distributed Checkpoint (DCP).
#ifndef CHECKPOINT_SAVE_DCP_EXPORT_H_
#define CHECKPOINT_SAVE_DCP_EXPORT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/run/tensor_parts.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

enum class DcpNames {
  kPlain,       // "model.NAME", "optim.state.NAME.exp_avg"
  kTorchtitan,  // "NAME", "optimizer.state.NAME.exp_avg"
};

// All ranks pass the same, but for `values`.
struct DcpExportOptions {
  DcpNames names = DcpNames::kPlain;
  int64_t max_chunk_bytes = kDcpMaxChunkBytes;
  // Of the optimizer's states, by parameter, as TrainingRecord has them:
  // {"weight": {"step": 7}}. Scalars of float32 there, as in torch.optim.
  std::map<std::string, std::map<std::string, int64_t>> numbers = {};
  // What is no tensor; those of rank 0 are written.
  std::vector<DcpWriteValue> values = {};
  RangeWriterOptions writer = {};
  absl::Duration timeout = absl::Minutes(30);  // of each wait for other ranks
};

// Writes `groups`, as PartsToWrite() gives them to this rank: a file for each
// rank that has elements, and `.metadata`. `folder` is whole or not there:
// until the end it is "FOLDER.incomplete", and what a killed export has left
// there is replaced. Four collectives, in one of which ranks tell their ranges;
// null: a single rank. What one rank cannot do all return as an error.
// AlreadyExists: `folder` is there. FailedPrecondition: another export writes
// it. InvalidArgument: ranks with other tensors,
// parts that do not have each element once, a dtype that PyTorch lacks.
absl::Status WriteDcp(FileSystem& files, const std::string& folder,
                      absl::Span<const TensorGroup> groups,
                      comm::Communicator* ranks,
                      const DcpExportOptions& options = DcpExportOptions());

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_DCP_EXPORT_H_
