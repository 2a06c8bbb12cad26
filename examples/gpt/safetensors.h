// Reads and writes tensors in safetensors files, one at a time, so that a
// sharded model can be saved without being whole anywhere.
#ifndef EXAMPLES_GPT_SAFETENSORS_H_
#define EXAMPLES_GPT_SAFETENSORS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/output_file.h"
#include "examples/gpt/safetensors_header.h"

namespace gpt {

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

// A file descriptor that closes itself.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor();

  int get() const { return fd_; }

 private:
  int fd_;
};

// A file being read. Thread-compatible. Errors name the file.
class SafetensorsReader {
 public:
  // NotFound or PermissionDenied when the file cannot be opened;
  // InvalidArgument when it is damaged.
  static absl::StatusOr<SafetensorsReader> Open(const std::string& path);

  // Copies the tensor `name` into `destination`, a dense CPU tensor. NotFound
  // without such a name; InvalidArgument when dtype or shape differ.
  absl::Status Read(absl::string_view name,
                    const at::Tensor& destination) const;

  // InvalidArgument when the file has tensors besides `names`.
  absl::Status ExpectOnly(absl::Span<const std::string> names) const;

 private:
  SafetensorsReader(std::string path, FileDescriptor file);

  std::string path_;
  FileDescriptor file_;
  int64_t data_begin_ = 0;
  absl::flat_hash_map<std::string, SafetensorsEntry> entries_;
};

// A file that takes the name `path` in Finish(), see fsdp::PartialFile: `path`
// never holds half a file. Without Finish() nothing remains.
// Thread-compatible. Errors name the file.
class SafetensorsWriter {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, absl::Span<const TensorSpec> tensors);
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // In any order, each name once. InvalidArgument when `tensor`, on any device,
  // is not what was announced.
  absl::Status Write(absl::string_view name, const at::Tensor& tensor);

  // FailedPrecondition while tensors are missing.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::string path, fsdp::PartialFile file);

  const std::string path_;
  fsdp::PartialFile file_;
  int64_t data_begin_ = 0;
  absl::flat_hash_map<std::string, SafetensorsEntry> entries_;
  absl::flat_hash_set<std::string> missing_;
};

}  // namespace gpt

#endif  // EXAMPLES_GPT_SAFETENSORS_H_
