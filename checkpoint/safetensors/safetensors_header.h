// The header of a safetensors file: which tensor lies where. Pure data, no
// files. The format: 8 bytes with the length of the JSON header (little
// endian), the header, then the tensors' bytes without gaps.
#ifndef CHECKPOINT_SAFETENSORS_SAFETENSORS_HEADER_H_
#define CHECKPOINT_SAFETENSORS_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint {

inline constexpr int64_t kSafetensorsLengthBytes = 8;
// The limit of the format's own implementation.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// Where data begins in files that we write: whole blocks of a disk.
inline constexpr int64_t kSafetensorsAlignment = 4096;

struct PlacedTensor {
  TensorInfo info;
  int64_t begin = 0;  // bytes from where data begins
  int64_t end = 0;

  friend bool operator==(const PlacedTensor& a, const PlacedTensor& b) {
    return a.info == b.info && a.begin == b.begin && a.end == b.end;
  }
};

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  SafetensorsMetadata metadata;
  std::vector<PlacedTensor> tensors;  // in the order of their bytes
  int64_t data_begin = 0;             // bytes from the beginning of the file
};

// Gives each tensor its bytes; the result has the order of `tensors`. Larger
// elements come before smaller ones, so that every tensor begins at a multiple
// of its element, which readers in Python need; among equal ones the order
// given decides. InvalidArgument, naming the tensor: what BytesOf() refuses,
// and more bytes than 64 bits count.
absl::StatusOr<std::vector<PlacedTensor>> PlaceTensors(
    absl::Span<const TensorInfo> tensors);

// The bytes of a file up to its tensors, padded with spaces to a multiple of
// kSafetensorsAlignment. The same arguments give the same bytes; tensors are
// listed in the order given. InvalidArgument: a name or metadata that is not
// UTF-8, "__metadata__" as a name, or a header that would be too long.
absl::StatusOr<std::string> FormatSafetensorsHeader(
    absl::Span<const PlacedTensor> tensors,
    const SafetensorsMetadata& metadata);

// The length of the JSON header that the first 8 bytes of a file of
// `file_bytes` announce. InvalidArgument when the file cannot hold it.
absl::StatusOr<int64_t> ParseSafetensorsLength(absl::string_view first_bytes,
                                               int64_t file_bytes);

// What the JSON header of a file of `file_bytes` says. InvalidArgument, naming
// the tensor: all that the format's own implementation refuses (0.8), which is
// anything but tensors that cover the data exactly. Memory is bounded: about
// ten times the header, and 80 MB for the largest of its entries.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         int64_t file_bytes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAFETENSORS_SAFETENSORS_HEADER_H_
