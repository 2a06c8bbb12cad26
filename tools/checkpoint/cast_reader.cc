#include "tools/checkpoint/cast_reader.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "tools/checkpoint/elements.h"

namespace fsdp::checkpoint::tool {
namespace {

absl::Status AddTo(int64_t& sum, int64_t bytes) {
  if (!__builtin_add_overflow(sum, bytes, &sum)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "all tensors together have more bytes than 64 bits count");
}

absl::Status TooLarge(const TensorInfo& info, Dtype from, double value) {
  return absl::InvalidArgumentError(absl::StrCat(
      info.name, " has the value ", value, ", which would become infinite in ",
      NameOf(info.dtype), ": convert to ", NameOf(from), " (--dtype)"));
}

}  // namespace

absl::StatusOr<CastReader> CastReader::Create(const Source& source,
                                              const std::string& prefix,
                                              std::optional<Dtype> dtype,
                                              OnBytes progress) {
  if (dtype.has_value() && !IsFloat(*dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cast to ", NameOf(*dtype), ": F64, F32, BF16 and F16 are possible"));
  }
  FSDP_RETURN_IF_ERROR(CheckAllReadable(source));
  CastReader result;
  for (const StoredTensor& tensor : source.catalog.tensors()) {
    if (!absl::StartsWith(tensor.info.name, prefix)) continue;
    TensorInfo info = tensor.info;
    info.name.erase(0, prefix.size());
    if (dtype.has_value() && IsFloat(info.dtype)) info.dtype = *dtype;
    FSDP_ASSIGN_OR_RETURN(const int64_t before, BytesOf(tensor.info));
    FSDP_RETURN_IF_ERROR(AddTo(result.total_, before));
    FSDP_ASSIGN_OR_RETURN(const int64_t after, BytesOf(info));
    FSDP_RETURN_IF_ERROR(AddTo(result.bytes_, after));
    result.tensors_.push_back(&tensor);
    result.infos_.push_back(std::move(info));
  }
  if (result.tensors_.empty() && !prefix.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(source.path, " has no tensor whose name begins with \"",
                     prefix, "\"; see checkpoint show --tensors"));
  }
  FSDP_ASSIGN_OR_RETURN(result.reader_, ReaderOf(source));
  result.progress_ = std::move(progress);
  return result;
}

absl::Status CastReader::Read(size_t tensor, int64_t begin, int64_t end,
                              TakeBytes take) {
  const Dtype from = tensors_[tensor]->info.dtype;
  const Dtype to = infos_[tensor].dtype;
  return StreamElements(*reader_, *tensors_[tensor], begin, end,
                        [&](absl::Span<const char> bytes) {
                          done_ += static_cast<int64_t>(bytes.size());
                          if (progress_) progress_(done_, total_);
                          if (from == to) return take(bytes);
                          cast_.clear();
                          const auto large = AppendCast(from, bytes, to, cast_);
                          return large ? TooLarge(infos_[tensor], from, *large)
                                       : take(cast_);
                        });
}

absl::Status CastReader::Read(size_t tensor, TakeBytes take) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(infos_[tensor]));
  return Read(tensor, 0, numel, take);
}

}  // namespace fsdp::checkpoint::tool
