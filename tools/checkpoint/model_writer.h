// Writes the tensors of a source in another format.
#ifndef TOOLS_CHECKPOINT_MODEL_WRITER_H_
#define TOOLS_CHECKPOINT_MODEL_WRITER_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/tensor/dtype.h"
#include "tools/checkpoint/progress.h"
#include "tools/checkpoint/source.h"

namespace fsdp::checkpoint::tool {

struct WriteOptions {
  // What tensors of F64, F32, BF16 and F16 become; unset: what they are.
  std::optional<Dtype> dtype;
  // Of tensors in one file; not of torch.save()'s, which is one file.
  int64_t max_file_bytes = 5'000'000'000;
  // Tensors whose names begin with it, which they lose; "": all.
  std::string prefix;
  // Of DCP: under which key of the state dict the tensors are; "": at its top.
  std::string dcp_item = "model";
  OnBytes progress;  // counts what is read
};

struct WriteReport {
  int64_t tensors = 0;
  int64_t files = 0;
  int64_t bytes = 0;  // of all files
};

// Each makes `out`, which appears once it is whole; reads and writes tensors
// one by one in O(buffer) memory. InvalidArgument: a prefix that no name has,
// dtypes that the format lacks, and tensors that cannot be read;
// ResourceExhausted, before any is, if the disk has too little space; the
// errors of NewPath, RangeReader and RangeWriter.
absl::StatusOr<WriteReport> WriteHuggingFace(const Source& source,
                                             const std::string& out,
                                             const WriteOptions& options);
// torch.distributed.checkpoint.
absl::StatusOr<WriteReport> WriteDcp(const Source& source,
                                     const std::string& out,
                                     const WriteOptions& options);
// torch.save() of a dict from names to tensors.
absl::StatusOr<WriteReport> WriteTorch(const Source& source,
                                       const std::string& out,
                                       const WriteOptions& options);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_MODEL_WRITER_H_
