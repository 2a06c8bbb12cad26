// The header of a safetensors file, which says which tensor lies where, as pure
// data. The format: 8 bytes with the length of the JSON header (little endian),
// the header, then the tensors' bytes without gaps.
#ifndef CHECKPOINT_FORMAT_SAFETENSORS_HEADER_H_
#define CHECKPOINT_FORMAT_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/json.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint {

inline constexpr int64_t kSafetensorsLengthBytes = 8;
// The limit of the format's reference implementation.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
// Data begins at a multiple of this in files that we write: a disk's block.
inline constexpr int64_t kSafetensorsAlignment = 4096;

struct PlacedTensor {
  TensorInfo info;
  int64_t begin = 0;  // bytes from the beginning of the data
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

// InvalidArgument, naming `key`: it is no list of integers of which none is
// negative.
absl::StatusOr<std::vector<int64_t>> ParseSizes(absl::string_view key,
                                                const Json& json);

// Gives each tensor its bytes; the result has the order of `tensors`. In the
// file larger elements come first, so that every tensor begins at a multiple of
// its element size, which readers in Python need; tensors of equal elements
// keep the given order. InvalidArgument, naming the tensor: BytesOf() refuses
// it, or the bytes exceed 64 bits.
absl::StatusOr<std::vector<PlacedTensor>> PlaceTensors(
    absl::Span<const TensorInfo> tensors);

// Returns the bytes of a file up to its data, padded with spaces to a multiple
// of kSafetensorsAlignment. The same arguments give the same bytes; tensors are
// listed in the given order. InvalidArgument: a name or metadata is not UTF-8,
// a name is "__metadata__", or the header would be too long.
absl::StatusOr<std::string> FormatSafetensorsHeader(
    absl::Span<const PlacedTensor> tensors,
    const SafetensorsMetadata& metadata);

// Returns the length of the JSON header that the first 8 bytes of a file of
// `file_bytes` announce. InvalidArgument: the file cannot hold it.
absl::StatusOr<int64_t> ParseSafetensorsLength(absl::string_view first_bytes,
                                               int64_t file_bytes);

// Parses the JSON header of a file of `file_bytes`. InvalidArgument, naming the
// tensor: the format's reference implementation (0.8) refuses it, as anything
// but tensors that cover the data exactly. Needs at most about ten times the
// header in memory, and 80 MB for the largest of its entries.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         int64_t file_bytes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FORMAT_SAFETENSORS_HEADER_H_
