#include "checkpoint/format/safetensors_header.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

constexpr absl::string_view kMetadata = "__metadata__";
// Values of one tensor's entry or of the metadata.
constexpr int64_t kMaxValues = 1 << 20;
// How files of other formats begin.
constexpr std::pair<absl::string_view, absl::string_view> kOthers[] = {
    {"PK\x03\x04",
     "a zip, as torch.save() writes it: `tools/interop/dcp.py model` makes "
     "safetensors of it"},
    {"\x80\x02",
     "a pickle, as torch.save() wrote it before PyTorch 1.6: "
     "`tools/interop/dcp.py model` makes safetensors of it"},
    {"version ",
     "a pointer of Git LFS: fetch the file that it names (git lfs pull)"}};

std::string Named(absl::string_view tensor) {
  return absl::StrCat("tensor \"", tensor, "\"");
}

absl::Status TensorError(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(Named(name), ": ", what));
}

absl::StatusOr<TensorInfo> ParseInfo(std::string name, const Json& dtype,
                                     const Json& shape) {
  const std::string* dtype_name = dtype.As<std::string>();
  if (dtype_name == nullptr) return TensorError(name, "\"dtype\" is no string");
  const std::optional<Dtype> known = DtypeNamed(*dtype_name);
  if (!known.has_value()) {
    return TensorError(name, absl::StrCat("unknown dtype \"",
                                          dtype_name->substr(0, 100), "\""));
  }
  TensorInfo info{std::move(name), *known, {}};
  FSDP_ASSIGN_OR_RETURN(info.shape,
                        Annotate(ParseSizes("shape", shape), Named(info.name)));
  // Sizes of 0 are passed over: the product of the others has to fit, too.
  int64_t bits = BitsOf(info.dtype);
  for (const int64_t size : info.shape) {
    if (size != 0 && __builtin_mul_overflow(bits, size, &bits)) {
      return TensorError(info.name, "its size does not fit 64 bits");
    }
  }
  return info;
}

// Ignores unknown members, as the format's own implementation does.
absl::StatusOr<PlacedTensor> ParseEntry(std::string name, const Json& json) {
  const Json* const dtype = json.Find("dtype");
  const Json* const shape = json.Find("shape");
  const Json* const offsets = json.Find("data_offsets");
  if (dtype == nullptr || shape == nullptr || offsets == nullptr) {
    return TensorError(name,
                       "expected an object of dtype, shape and data_offsets");
  }
  PlacedTensor tensor;
  FSDP_ASSIGN_OR_RETURN(tensor.info,
                        ParseInfo(std::move(name), *dtype, *shape));
  FSDP_ASSIGN_OR_RETURN(
      const std::vector<int64_t> range,
      Annotate(ParseSizes("data_offsets", *offsets), Named(tensor.info.name)));
  if (range.size() != 2 || range[0] > range[1]) {
    return TensorError(tensor.info.name,
                       "\"data_offsets\" is no pair of begin and end");
  }
  tensor.begin = range[0];
  tensor.end = range[1];
  FSDP_ASSIGN_OR_RETURN(int64_t bytes, BytesOf(tensor.info));
  if (bytes != tensor.end - tensor.begin) {
    return TensorError(tensor.info.name,
                       absl::StrCat(ToString(tensor.info), " takes ", bytes,
                                    " bytes, but its data_offsets span ",
                                    tensor.end - tensor.begin));
  }
  return tensor;
}

absl::Status ParseMetadata(const Json& json, SafetensorsMetadata& metadata) {
  if (json == Json()) return absl::OkStatus();
  const Json::Object* object = json.As<Json::Object>();
  if (object == nullptr) {
    return absl::InvalidArgumentError("\"__metadata__\" is no object");
  }
  for (const auto& [key, value] : *object) {
    const std::string* text = value.As<std::string>();
    if (text == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"__metadata__\" may hold strings only, but \"", key, "\" is none"));
    }
    metadata[key] = *text;
  }
  return absl::OkStatus();
}

// The tensors' bytes have to follow each other from 0 to the end.
absl::Status CheckCoverage(absl::Span<const PlacedTensor> tensors,
                           int64_t data_bytes) {
  int64_t end = 0;
  for (const PlacedTensor& tensor : tensors) {
    if (tensor.begin != end) {
      return TensorError(
          tensor.info.name,
          absl::StrCat("begins at byte ", tensor.begin,
                       tensor.begin < end
                           ? ", inside the tensor before it, which ends at "
                           : ", after a gap from ",
                       end));
    }
    end = tensor.end;
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

absl::StatusOr<std::vector<int64_t>> ParseSizes(absl::string_view key,
                                                const Json& json) {
  const Json::Array* const array = json.As<Json::Array>();
  bool valid = array != nullptr;
  std::vector<int64_t> sizes;
  for (size_t i = 0; valid && i < array->size(); ++i) {
    const int64_t* const size = (*array)[i].As<int64_t>();
    valid = size != nullptr && *size >= 0;
    if (valid) sizes.push_back(*size);
  }
  if (valid) return sizes;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", key, "\" is ", json.ToString().substr(0, 100),
                   ", not a list of integers >= 0"));
}

absl::StatusOr<std::vector<PlacedTensor>> PlaceTensors(
    absl::Span<const TensorInfo> tensors) {
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&tensors](size_t a, size_t b) {
    return ItemBytes(tensors[a].dtype) > ItemBytes(tensors[b].dtype);
  });
  std::vector<PlacedTensor> placed(tensors.size());
  int64_t end = 0;
  for (const size_t i : order) {
    FSDP_ASSIGN_OR_RETURN(int64_t bytes, BytesOf(tensors[i]));
    placed[i] = {tensors[i], end, 0};
    if (__builtin_add_overflow(end, bytes, &end)) {
      return TensorError(tensors[i].name, "its offset does not fit 64 bits");
    }
    placed[i].end = end;
  }
  return placed;
}

absl::StatusOr<std::string> FormatSafetensorsHeader(
    absl::Span<const PlacedTensor> tensors,
    const SafetensorsMetadata& metadata) {
  Json::Object texts;
  for (const auto& [key, text] : metadata) {
    if (!IsUtf8(key) || !IsUtf8(text)) {
      return absl::InvalidArgumentError(
          absl::StrCat("metadata \"", key, "\" of safetensors is not UTF-8"));
    }
    texts.emplace_back(key, text);
  }
  std::string json = "{";
  if (!texts.empty()) {
    absl::StrAppend(&json, Json(kMetadata).ToString(), ": ",
                    Json(std::move(texts)).ToString());
  }
  for (const PlacedTensor& tensor : tensors) {
    if (!IsUtf8(tensor.info.name) || tensor.info.name == kMetadata) {
      return TensorError(
          tensor.info.name,
          "safetensors has no such name; it takes UTF-8 but \"__metadata__\"");
    }
    const Json entry =
        Json::Object{{"dtype", NameOf(tensor.info.dtype)},
                     {"shape", tensor.info.shape},
                     {"data_offsets", Json::Array{tensor.begin, tensor.end}}};
    absl::StrAppend(&json, json.size() == 1 ? "" : ", ",
                    Json(tensor.info.name).ToString(), ": ", entry.ToString());
  }
  json.push_back('}');
  const size_t used = kSafetensorsLengthBytes + json.size();
  json.append((kSafetensorsAlignment - used % kSafetensorsAlignment) %
                  kSafetensorsAlignment,
              ' ');
  if (json.size() > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a safetensors header of ", json.size(), " bytes for ", tensors.size(),
        " tensors; the format allows ", kMaxSafetensorsHeaderBytes,
        ": write them into more files"));
  }
  std::string length;  // little endian
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    length.push_back(static_cast<char>(json.size() >> (8 * i)));
  }
  return length + json;
}

absl::StatusOr<int64_t> ParseSafetensorsLength(absl::string_view first_bytes,
                                               int64_t file_bytes) {
  if (first_bytes.size() < kSafetensorsLengthBytes ||
      file_bytes < kSafetensorsLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no safetensors file: ", file_bytes, " bytes cannot hold a header"));
  }
  uint64_t length = 0;
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    const uint64_t byte = static_cast<unsigned char>(first_bytes[i]);
    length |= byte << (8 * i);
  }
  const uint64_t room = file_bytes - kSafetensorsLengthBytes;
  if (length > kMaxSafetensorsHeaderBytes || length > room) {
    for (const auto& [begin, what] : kOthers) {
      if (absl::StartsWith(first_bytes, begin)) {
        return absl::InvalidArgumentError(
            absl::StrCat("no safetensors file, but ", what));
      }
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "no safetensors file, or a truncated one: its first 8 bytes announce a "
        "header of ",
        length, " bytes, ", room, " follow (", kMaxSafetensorsHeaderBytes,
        " are the most that the format allows)"));
  }
  return static_cast<int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         int64_t file_bytes) {
  // The format asks for this; it reveals other kinds of file early.
  if (!absl::StartsWith(json, "{")) {
    return absl::InvalidArgumentError(
        "no safetensors file: its header does not begin with '{'");
  }
  SafetensorsHeader header;
  header.data_begin =
      kSafetensorsLengthBytes + static_cast<int64_t>(json.size());
  FSDP_RETURN_IF_ERROR(Json::ParseMembers(
      json, kMaxValues,
      [&header](std::string name, const Json& value) -> absl::Status {
        if (name == kMetadata) return ParseMetadata(value, header.metadata);
        FSDP_ASSIGN_OR_RETURN(PlacedTensor tensor,
                              ParseEntry(std::move(name), value));
        header.tensors.push_back(std::move(tensor));
        return absl::OkStatus();
      }));
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const PlacedTensor& a, const PlacedTensor& b) {
              return std::tie(a.begin, a.end, a.info.name) <
                     std::tie(b.begin, b.end, b.info.name);
            });
  FSDP_RETURN_IF_ERROR(
      CheckCoverage(header.tensors, file_bytes - header.data_begin));
  return header;
}

}  // namespace fsdp::checkpoint
