#include "examples/gpt/safetensors_header.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/status_macros.h"

namespace gpt {
namespace {

using ::fsdp::Json;

constexpr absl::string_view kMetadata = "__metadata__";
// The limit of the format's own implementation.
constexpr int64_t kMaxHeaderBytes = 100'000'000;

absl::Status TensorError(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", name, "\": ", what));
}

absl::StatusOr<int64_t> ByteSize(const SafetensorsEntry& entry) {
  int64_t bytes = SafetensorsItemSize(entry.dtype);
  if (bytes == 0) {
    return TensorError(entry.name,
                       absl::StrCat("unknown dtype \"", entry.dtype, "\""));
  }
  for (int64_t size : entry.shape) {
    if (size < 0) return TensorError(entry.name, "a negative size");
    if (__builtin_mul_overflow(bytes, size, &bytes)) {
      return TensorError(entry.name, "its size does not fit 64 bits");
    }
  }
  return bytes;
}

// A JSON array of integers that are not negative.
absl::StatusOr<std::vector<int64_t>> Sizes(absl::string_view tensor,
                                           absl::string_view key,
                                           const Json& json) {
  const Json::Array* array = json.As<Json::Array>();
  std::vector<int64_t> sizes;
  for (size_t i = 0; array != nullptr && i < array->size(); ++i) {
    const int64_t* size = (*array)[i].As<int64_t>();
    if (size == nullptr || *size < 0) {
      array = nullptr;
      break;
    }
    sizes.push_back(*size);
  }
  if (array == nullptr) {
    return TensorError(tensor,
                       absl::StrCat("\"", key, "\" is ", json.ToString(),
                                    ", not a list of integers >= 0"));
  }
  return sizes;
}

absl::StatusOr<SafetensorsEntry> ParseEntry(const std::string& name,
                                            const Json& json) {
  const Json::Object* object = json.As<Json::Object>();
  if (object == nullptr || object->size() != 3) {
    return TensorError(name,
                       "expected an object of dtype, shape and data_offsets");
  }
  const Json* dtype = json.Find("dtype");
  const Json* shape = json.Find("shape");
  const Json* offsets = json.Find("data_offsets");
  if (dtype == nullptr || shape == nullptr || offsets == nullptr) {
    return TensorError(name,
                       "expected an object of dtype, shape and data_offsets");
  }
  if (dtype->As<std::string>() == nullptr) {
    return TensorError(name, "\"dtype\" is no string");
  }
  SafetensorsEntry entry{name, *dtype->As<std::string>(), {}, 0, 0};
  FSDP_ASSIGN_OR_RETURN(entry.shape, Sizes(name, "shape", *shape));
  FSDP_ASSIGN_OR_RETURN(std::vector<int64_t> range,
                        Sizes(name, "data_offsets", *offsets));
  if (range.size() != 2 || range[0] > range[1]) {
    return TensorError(name, "\"data_offsets\" is no pair of begin and end");
  }
  entry.begin = range[0];
  entry.end = range[1];
  FSDP_ASSIGN_OR_RETURN(int64_t bytes, ByteSize(entry));
  if (bytes != entry.end - entry.begin) {
    return TensorError(
        name, absl::StrCat(entry.dtype, "[", absl::StrJoin(entry.shape, ", "),
                           "] takes ", bytes, " bytes, but its data_offsets ",
                           "span ", entry.end - entry.begin));
  }
  return entry;
}

// Tensors in the order of their bytes must follow each other from 0 to the end.
absl::Status CheckCoverage(absl::Span<const SafetensorsEntry> entries,
                           int64_t data_bytes) {
  int64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != end) {
      return TensorError(
          entry.name, absl::StrCat("begins at byte ", entry.begin,
                                   entry.begin < end
                                       ? ", inside the tensor before it, which "
                                         "ends at "
                                       : ", after a gap from ",
                                   end));
    }
    end = entry.end;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensors take ", end, " bytes, but the file has ",
                     data_bytes, " after its header: it is ",
                     end > data_bytes ? "truncated" : "longer than it says"));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t SafetensorsItemSize(absl::string_view dtype) {
  for (absl::string_view name : {"F64", "I64", "U64"}) {
    if (dtype == name) return 8;
  }
  for (absl::string_view name : {"F32", "I32", "U32"}) {
    if (dtype == name) return 4;
  }
  for (absl::string_view name : {"F16", "BF16", "I16", "U16"}) {
    if (dtype == name) return 2;
  }
  for (absl::string_view name : {"I8", "U8", "BOOL"}) {
    if (dtype == name) return 1;
  }
  return 0;
}

absl::StatusOr<std::vector<SafetensorsEntry>> PlaceSafetensors(
    std::vector<SafetensorsEntry> entries) {
  int64_t end = 0;
  for (SafetensorsEntry& entry : entries) {
    FSDP_ASSIGN_OR_RETURN(int64_t bytes, ByteSize(entry));
    entry.begin = end;
    if (__builtin_add_overflow(end, bytes, &end)) {
      return TensorError(entry.name, "its offset does not fit 64 bits");
    }
    entry.end = end;
  }
  return entries;
}

std::string FormatSafetensorsHeader(
    absl::Span<const SafetensorsEntry> entries) {
  Json::Object object;
  for (const SafetensorsEntry& entry : entries) {
    object.emplace_back(
        entry.name,
        Json::Object{{"dtype", entry.dtype},
                     {"shape", entry.shape},
                     {"data_offsets", Json::Array{entry.begin, entry.end}}});
  }
  std::string json = Json(std::move(object)).ToString();
  json.resize((json.size() + 7) / 8 * 8, ' ');
  std::string header;
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    header.push_back(static_cast<char>(json.size() >> (8 * i)));
  }
  return header + json;
}

absl::StatusOr<int64_t> ParseSafetensorsLength(absl::string_view first_bytes,
                                               int64_t file_bytes) {
  if (first_bytes.size() < kSafetensorsLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no safetensors file: ", file_bytes, " bytes cannot hold a header"));
  }
  uint64_t length = 0;
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    const uint64_t byte = static_cast<unsigned char>(first_bytes[i]);
    length |= byte << (8 * i);
  }
  const uint64_t room = file_bytes - kSafetensorsLengthBytes;
  if (length > kMaxHeaderBytes || length > room) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no safetensors file, or a truncated one: its first 8 bytes announce a "
        "header of ",
        length, " bytes, ", room, " follow (", kMaxHeaderBytes,
        " are the most that the format allows)"));
  }
  return static_cast<int64_t>(length);
}

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensorsHeader(
    absl::string_view json, int64_t data_bytes) {
  // Asked for by the format, so that other kinds of file are told early.
  if (!absl::StartsWith(json, "{")) {
    return absl::InvalidArgumentError(
        "no safetensors file: its header does not begin with '{'");
  }
  FSDP_ASSIGN_OR_RETURN(Json header, Json::Parse(json));
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, value] : *header.As<Json::Object>()) {
    if (name == kMetadata) continue;
    FSDP_ASSIGN_OR_RETURN(SafetensorsEntry entry, ParseEntry(name, value));
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::tie(a.begin, a.end, a.name) <
                     std::tie(b.begin, b.end, b.name);
            });
  FSDP_RETURN_IF_ERROR(CheckCoverage(entries, data_bytes));
  return entries;
}

}  // namespace gpt
