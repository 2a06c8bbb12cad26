#include "checkpoint/run/tensor_parts.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/optimizer_values.h"
#include "ranges/tensor_range.h"

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

c10::ScalarType DtypeFor(c10::ScalarType own, const PartOptions& options) {
  return c10::isFloatingType(own) ? options.model_dtype.value_or(own) : own;
}

// Makes `range`, which is whole or row-major, what this rank writes of it.
// `name` is its name in the model.
absl::Status TakePart(int rank, const ModelValues& model,
                      const std::string& name, TensorRange& range) {
  at::Tensor& values = range.values;
  if (range.is_whole) {
    if (values.layout() != c10::kStrided) {
      const bool is_parameter = absl::c_any_of(
          model.parameters(),
          [&name](const TensorRange& one) { return one.name == name; });
      return absl::InvalidArgumentError(
          absl::StrCat(is_parameter ? "parameter " : "buffer ", range.name,
                       " is not strided: no safetensors file can hold it"));
    }
    values = rank == 0
                 ? values.detach().resolve_conj().resolve_neg().contiguous()
                 : at::empty({0}, values.options().requires_grad(false));
    values = values.view({-1});
    range.strides = RowMajorStrides(range.sizes);
    range.is_whole = false;
  } else {
    const auto [from, to] =
        EvenPart(values.numel(), range.replica, range.replicas);
    values = values.detach().narrow(0, from, to - from);
    range.begin += from;
  }
  if (FileDtype(range.file_dtype()).has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor ", range.name, " is of dtype ", c10::toString(range.file_dtype()),
      ", which no safetensors file can hold"));
}

std::optional<std::string> NameInFile(const std::string& name,
                                      const PartOptions& options) {
  return options.names == nullptr ? name : options.names(name);
}

// The parts of `ranges`, which are the model's or laid out as these.
absl::StatusOr<TensorGroup> GroupOf(std::string stem, const RunValues& values,
                                    std::vector<TensorRange> ranges, int rank,
                                    const PartOptions& options) {
  if (values.sharded() != nullptr) {
    FSDP_RETURN_IF_ERROR(MakeRowMajor(*values.sharded(), ranges));
  }
  std::set<std::string> names;
  for (TensorRange& range : ranges) {
    const std::string name =
        std::exchange(range.name, *NameInFile(range.name, options));
    range.dtype = DtypeFor(range.file_dtype(), options);
    FSDP_RETURN_IF_ERROR(TakePart(rank, values.model(), name, range));
    if (names.insert(range.name).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("two tensors of the model have the name ", range.name,
                     " in the files"));
  }
  return TensorGroup{std::move(stem), std::move(ranges)};
}

absl::StatusOr<TensorGroup> ModelGroup(const RunValues& values, int rank,
                                       const PartOptions& options) {
  std::vector<TensorRange> ranges;
  for (const TensorRange& range : values.model().all) {
    if (NameInFile(range.name, options).has_value()) ranges.push_back(range);
  }
  return GroupOf(options.model_stem, values, std::move(ranges), rank, options);
}

// What PartsToWrite() goes by where it is collective: ranks whose texts differ
// would wait for each other.
std::string TextOf(const RunValues& values, const PartOptions& options) {
  std::string text = absl::StrCat("dtype: ",
                                  options.model_dtype.has_value()
                                      ? c10::toString(*options.model_dtype)
                                      : "the model's",
                                  "\n");
  for (const TensorRange& range : values.model().ranges()) {
    const std::optional<std::string> name = NameInFile(range.name, options);
    if (name != range.name) {
      absl::StrAppend(&text, range.name, " is ", name.value_or("left out"),
                      "\n");
    }
  }
  if (values.averages().has_value()) text += "an average of the weights\n";
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
  return values.sharded() != nullptr &&
         absl::c_any_of(values.model().ranges(), [](const TensorRange& range) {
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
  std::map<std::string, std::vector<TensorRange>> states;  // by stem
  if (values.averages().has_value()) states[kAverageStem] = *values.averages();
  if (values.optimizer() != nullptr) {
    for (auto& [key, ranges] :
         SlotRanges(values.model().parameters(), *values.optimizer())) {
      states[absl::StrCat("optimizer/", key)] = std::move(ranges);
    }
  }
  for (auto& [stem, ranges] : states) {
    FSDP_ASSIGN_OR_RETURN(
        TensorGroup group,
        GroupOf(stem, values, std::move(ranges), rank, PartOptions()));
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

TensorInfo InfoOf(const TensorRange& part) {
  return {part.name, *FileDtype(part.file_dtype()), part.sizes};
}

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
