// The header of a safetensors file: which tensor lies where. Pure data: no
// torch, no files. The format: 8 bytes with the length of the JSON header
// (little endian), the header, then the tensors' bytes without gaps.
#ifndef EXAMPLES_GPT_SAFETENSORS_HEADER_H_
#define EXAMPLES_GPT_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace gpt {

inline constexpr int64_t kSafetensorsLengthBytes = 8;

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // as the format spells it: "F32"
  std::vector<int64_t> shape;
  int64_t begin = 0;  // bytes from the end of the header
  int64_t end = 0;

  friend bool operator==(const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape &&
           a.begin == b.begin && a.end == b.end;
  }
};

// Bytes of one element, 0 for a dtype the format does not have.
int64_t SafetensorsItemSize(absl::string_view dtype);

// Sets begin and end of every entry so that they follow each other.
// InvalidArgument: an unknown dtype, a negative size, a total beyond int64.
absl::StatusOr<std::vector<SafetensorsEntry>> PlaceSafetensors(
    std::vector<SafetensorsEntry> entries);

// The bytes of a file up to its tensors, padded with spaces so that these begin
// at a multiple of 8 bytes.
std::string FormatSafetensorsHeader(absl::Span<const SafetensorsEntry> entries);

// The length of the JSON header that the first 8 bytes of a file of
// `file_bytes` announce. InvalidArgument when the file cannot hold it.
absl::StatusOr<int64_t> ParseSafetensorsLength(absl::string_view first_bytes,
                                               int64_t file_bytes);

// The entries of a JSON header, in the order of their bytes. InvalidArgument,
// naming the tensor: anything the format does not allow, and tensors that
// overlap, leave gaps or do not cover `data_bytes` exactly.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(
    absl::string_view json, int64_t data_bytes);

}  // namespace gpt

#endif  // EXAMPLES_GPT_SAFETENSORS_HEADER_H_
