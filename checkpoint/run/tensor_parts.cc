#include "checkpoint/run/tensor_parts.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "fsdp/state/model_values.h"

namespace fsdp::checkpoint {

absl::Status Caught(absl::string_view what,
                    absl::FunctionRef<absl::Status()> act) {
  return TorchToStatus(what, act);
}

absl::Time Together::Deadline() const { return absl::Now() + timeout_; }

absl::Status Together::Agree(const absl::Status& mine) const {
  if (ranks_ == nullptr) return mine;
  return comm::Agree(*ranks_, mine, what_, Deadline());
}

absl::Status Together::CheckSame(const std::string& text,
                                 absl::string_view of) const {
  if (ranks_ == nullptr) return absl::OkStatus();
  return comm::CheckSame(*ranks_, text, of, Deadline());
}

namespace {

absl::StatusOr<TensorInfo> InfoOf(const std::string& name,
                                  c10::ScalarType dtype,
                                  std::vector<int64_t> sizes) {
  const std::optional<Dtype> file_dtype = FileDtype(dtype);
  if (!file_dtype.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " is of dtype ", c10::toString(dtype),
                     ", which no safetensors file can hold"));
  }
  return TensorInfo{name, *file_dtype, std::move(sizes)};
}

c10::ScalarType DtypeFor(c10::ScalarType own, const PartOptions& options) {
  return c10::isFloatingType(own) ? options.model_dtype.value_or(own) : own;
}

at::Tensor Nothing(const at::Tensor& like) {
  return at::empty({0}, like.options().requires_grad(false));
}

// This rank's share of a range that all replicas have.
void TakeShare(int replica, int replicas, int64_t& begin, at::Tensor& values) {
  if (replicas == 1) return;
  const auto [from, to] = EvenPart(values.numel(), replica, replicas);
  values = values.narrow(0, from, to - from);
  begin += from;
}

// The values of a model that is not sharded, in row-major order.
at::Tensor Whole(const at::Tensor& tensor, int rank) {
  if (rank != 0) return Nothing(tensor);
  return tensor.detach().resolve_conj().resolve_neg().contiguous().view({-1});
}

absl::StatusOr<TensorPart> PartOf(const WholeValue& other, int rank,
                                  const PartOptions& options) {
  if (other.tensor.layout() != c10::kStrided) {
    return absl::InvalidArgumentError(
        absl::StrCat(other.is_buffer ? "buffer " : "parameter ", other.name,
                     " is not strided: no safetensors file can hold it"));
  }
  TensorPart part;
  FSDP_ASSIGN_OR_RETURN(part.info,
                        InfoOf(other.name, DtypeFor(other.file_dtype, options),
                               other.tensor.sizes().vec()));
  part.values = Whole(other.tensor, rank);
  return part;
}

// `range` is row-major, or of a model that is not sharded.
TensorPart PartOf(const ValueRange& range, TensorInfo info,
                  const at::Tensor& values, bool is_sharded, int rank) {
  TensorPart part{std::move(info), range.begin, at::Tensor()};
  if (is_sharded) {
    part.values = values.detach();
    TakeShare(range.replica, range.replicas, part.begin, part.values);
  } else {
    part.values = Whole(values, rank);
  }
  return part;
}

// What a group has of the leaf of this number; undefined: nothing.
using TensorOfLeaf = absl::FunctionRef<at::Tensor(size_t leaf)>;

// Tensors that are laid out as the parameters that have them.
absl::StatusOr<TensorGroup> StateGroup(const std::string& stem,
                                       const RunValues& values, int rank,
                                       TensorOfLeaf tensor_of) {
  TensorGroup group{stem, {}};
  std::vector<ValueRange> ranges;
  size_t leaf = 0;
  for (const ValueRange& parameter : values.model().parameters) {
    at::Tensor tensor = tensor_of(leaf++);
    if (!tensor.defined()) continue;
    ranges.push_back(parameter);
    ranges.back().values = std::move(tensor);
  }
  const bool is_sharded = values.sharded() != nullptr;
  if (is_sharded) {
    FSDP_RETURN_IF_ERROR(MakeRowMajor(*values.sharded(), ranges));
  }
  for (const ValueRange& range : ranges) {
    FSDP_ASSIGN_OR_RETURN(
        TensorInfo info,
        InfoOf(range.name, range.values.scalar_type(), range.sizes));
    group.parts.push_back(
        PartOf(range, std::move(info), range.values, is_sharded, rank));
  }
  for (; leaf < values.leaves().size(); ++leaf) {
    const at::Tensor tensor = tensor_of(leaf);
    if (!tensor.defined()) continue;
    FSDP_ASSIGN_OR_RETURN(TensorPart part,
                          PartOf({values.leaves()[leaf].name, tensor,
                                  tensor.scalar_type(), /*is_buffer=*/false},
                                 rank, PartOptions()));
    group.parts.push_back(std::move(part));
  }
  return group;
}

// The slot `key` of all parameters that have it.
absl::StatusOr<TensorGroup> SlotGroup(const std::string& key,
                                      const RunValues& values, int rank) {
  return StateGroup(absl::StrCat("optimizer/", key), values, rank,
                    [&](size_t leaf) {
                      const auto& all = values.optimizer()->slots;
                      const auto slots = all.find(values.leaves()[leaf].name);
                      if (slots == all.end()) return at::Tensor();
                      const auto slot = slots->second.tensors.find(key);
                      return slot == slots->second.tensors.end() ? at::Tensor()
                                                                 : slot->second;
                    });
}

std::optional<std::string> NameInFile(const std::string& name,
                                      const PartOptions& options) {
  return options.names == nullptr ? name : options.names(name);
}

absl::Status CheckNames(const TensorGroup& group) {
  std::set<std::string> names;
  for (const TensorPart& part : group.parts) {
    if (names.insert(part.info.name).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("two tensors of the model have the name ", part.info.name,
                     " in the files"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorGroup> ModelGroup(const RunValues& values, int rank,
                                       const PartOptions& options) {
  TensorGroup group{options.model_stem, {}};
  const bool is_sharded = values.sharded() != nullptr;
  std::vector<ValueRange> ranges;
  for (const ValueRange& range : values.model().parameters) {
    if (NameInFile(range.name, options).has_value()) ranges.push_back(range);
  }
  if (is_sharded) {
    FSDP_RETURN_IF_ERROR(MakeRowMajor(*values.sharded(), ranges));
  }
  for (const ValueRange& range : ranges) {
    FSDP_ASSIGN_OR_RETURN(
        TensorInfo info,
        InfoOf(*NameInFile(range.name, options),
               DtypeFor(range.values.scalar_type(), options), range.sizes));
    group.parts.push_back(
        PartOf(range, std::move(info), range.values, is_sharded, rank));
  }
  for (const WholeValue& other : values.model().others) {
    const std::optional<std::string> name = NameInFile(other.name, options);
    if (!name.has_value()) continue;
    FSDP_ASSIGN_OR_RETURN(TensorPart part, PartOf(other, rank, options));
    part.info.name = *name;
    group.parts.push_back(std::move(part));
  }
  FSDP_RETURN_IF_ERROR(CheckNames(group));
  return group;
}

// What PartsToWrite() goes by where it is collective: ranks whose texts differ
// would wait for each other.
std::string TextOf(const RunValues& values, const PartOptions& options) {
  std::string text = absl::StrCat("dtype: ",
                                  options.model_dtype.has_value()
                                      ? c10::toString(*options.model_dtype)
                                      : "the model's",
                                  "\n");
  for (const ValueRange& range : values.model().parameters) {
    const std::optional<std::string> name = NameInFile(range.name, options);
    if (name != range.name) {
      absl::StrAppend(&text, range.name, " is ", name.value_or("left out"),
                      "\n");
    }
  }
  if (!values.averages().empty()) text += "an average of the weights\n";
  if (values.optimizer() == nullptr) return text + "no optimizer\n";
  for (const auto& [name, slots] : values.optimizer()->slots) {
    absl::StrAppend(&text, "optimizer of ", name, ":");
    for (const auto& [key, tensor] : slots.tensors) {
      absl::StrAppend(&text, " ", key, " ",
                      c10::toString(tensor.scalar_type()));
    }
    text += '\n';
  }
  return text;
}

}  // namespace

bool IsCollective(const RunValues& values) {
  const std::vector<ValueRange>& ranges = values.model().parameters;
  return values.sharded() != nullptr &&
         std::any_of(ranges.begin(), ranges.end(), [](const ValueRange& range) {
           return !range.IsRowMajor();
         });
}

absl::Status CheckSameParts(const Together& together, const RunValues& values,
                            const PartOptions& options) {
  if (!IsCollective(values)) return absl::OkStatus();
  return together.CheckSame(TextOf(values, options), "what is to be saved");
}

absl::StatusOr<std::vector<TensorGroup>> PartsToWrite(
    const RunValues& values, int rank, const PartOptions& options) {
  if (options.model_dtype.has_value() &&
      !c10::isFloatingType(*options.model_dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "floating-point values cannot be saved as ",
        c10::toString(*options.model_dtype),
        ": name a floating-point dtype, or none, for those that they have"));
  }
  const c10::NoGradGuard no_grad;
  std::vector<TensorGroup> groups;
  FSDP_ASSIGN_OR_RETURN(TensorGroup model, ModelGroup(values, rank, options));
  groups.push_back(std::move(model));
  if (!values.averages().empty()) {
    FSDP_ASSIGN_OR_RETURN(
        TensorGroup averages,
        StateGroup(kAverageStem, values, rank,
                   [&](size_t leaf) { return values.averages()[leaf]; }));
    groups.push_back(std::move(averages));
  }
  if (values.optimizer() == nullptr) return groups;
  std::set<std::string> keys;
  for (const auto& [name, slots] : values.optimizer()->slots) {
    for (const auto& [key, tensor] : slots.tensors) keys.insert(key);
  }
  for (const std::string& key : keys) {
    FSDP_ASSIGN_OR_RETURN(TensorGroup group, SlotGroup(key, values, rank));
    groups.push_back(std::move(group));
  }
  return groups;
}

namespace {

struct Pair {
  c10::ScalarType torch;
  Dtype file;
};

constexpr std::array<Pair, 19> kPairs = {{
    {c10::ScalarType::Bool, Dtype::kBool},
    {c10::ScalarType::Byte, Dtype::kU8},
    {c10::ScalarType::Char, Dtype::kI8},
    {c10::ScalarType::Float8_e5m2, Dtype::kF8E5M2},
    {c10::ScalarType::Float8_e4m3fn, Dtype::kF8E4M3},
    {c10::ScalarType::Float8_e8m0fnu, Dtype::kF8E8M0},
    {c10::ScalarType::Float8_e4m3fnuz, Dtype::kF8E4M3Fnuz},
    {c10::ScalarType::Float8_e5m2fnuz, Dtype::kF8E5M2Fnuz},
    {c10::ScalarType::Short, Dtype::kI16},
    {c10::ScalarType::UInt16, Dtype::kU16},
    {c10::ScalarType::Half, Dtype::kF16},
    {c10::ScalarType::BFloat16, Dtype::kBF16},
    {c10::ScalarType::Int, Dtype::kI32},
    {c10::ScalarType::UInt32, Dtype::kU32},
    {c10::ScalarType::Float, Dtype::kF32},
    {c10::ScalarType::ComplexFloat, Dtype::kC64},
    {c10::ScalarType::Double, Dtype::kF64},
    {c10::ScalarType::Long, Dtype::kI64},
    {c10::ScalarType::UInt64, Dtype::kU64},
}};

}  // namespace

std::optional<Dtype> FileDtype(c10::ScalarType dtype) {
  for (const Pair& pair : kPairs) {
    if (pair.torch == dtype) return pair.file;
  }
  return std::nullopt;
}

std::optional<c10::ScalarType> TorchDtype(Dtype dtype) {
  for (const Pair& pair : kPairs) {
    if (pair.file == dtype) return pair.torch;
  }
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
