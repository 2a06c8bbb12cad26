// Tensors in any format that //checkpoint reads and writes, for programs that
// Python's libraries are compared with.
#ifndef CHECKPOINT_TESTING_SAMPLE_TENSORS_H_
#define CHECKPOINT_TESTING_SAMPLE_TENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint::testing {

struct SampleTensor {
  TensorInfo info;
  std::string bytes;
};

// Returns a tensor of dtype F32.
SampleTensor Floats(const std::string& name, const std::vector<int64_t>& shape,
                    const std::vector<float>& values);

// "NAME F32 [5,7] 1a2b3c4d": the last is the CRC32 of its bytes.
std::string LineOf(const SampleTensor& tensor);

// Dtypes and shapes of all sorts that PyTorch has, with bytes that differ.
std::vector<SampleTensor> PatternTensors();

// `path` is a folder, which SourceFolder::ReadModel() reads, an index, or a
// safetensors file.
absl::StatusOr<std::vector<SampleTensor>> ReadSample(const std::string& path);

// The files of a Hugging Face model by their names, after `stem`.
std::map<std::string, std::string> ModelFiles(
    absl::Span<const SampleTensor> tensors, const std::string& stem = "model",
    int64_t max_file_bytes = 1 << 30);

// Those into which each of `ranks` writes an equal part of each tensor.
std::map<std::string, std::string> RankFiles(
    absl::Span<const SampleTensor> tensors, int ranks);

// "safetensors": one file in the folder `path`; "huggingface": several and an
// index; "shards": those of RankFiles().
absl::Status WriteSample(absl::Span<const SampleTensor> tensors,
                         absl::string_view format, const std::string& path,
                         int ranks);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTING_SAMPLE_TENSORS_H_
