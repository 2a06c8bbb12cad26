#include "fsdp/state/state_dict_load.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::Slice;

// One line if `value` cannot become what has `sizes` and `dtype`.
void CheckValue(const std::string& name, const at::Tensor& value,
                at::IntArrayRef sizes, c10::ScalarType dtype,
                std::vector<std::string>& differences) {
  if (!value.defined() || value.sizes() != sizes) {
    differences.push_back(
        absl::StrCat(name, ": shape ",
                     value.defined() ? SizesText(value.sizes()) : "undefined",
                     " instead of ", SizesText(sizes)));
    return;
  }
  const std::string difference = DtypeDifference(value.scalar_type(), dtype);
  if (difference.empty()) return;
  differences.push_back(absl::StrCat(name, ": ", difference));
}

}  // namespace

void OverwriteShards(ShardedModel& model, absl::Span<const at::Tensor> shards) {
  c10::NoGradGuard no_grad;
  size_t next = 0;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      const Resident resident =
          ValueOrThrow(Resident::Of(flat->shard(), Use::kOverwrite));
      at::Tensor shard = flat->shard().detach();
      shard.copy_(shards[next++]);
    }
  }
}

at::Tensor CopyOf(const at::Tensor& tensor, c10::ScalarType dtype,
                  bool to_cpu) {
  c10::NoGradGuard no_grad;
  const c10::Device device = to_cpu ? c10::Device(c10::kCPU) : tensor.device();
  if (tensor.scalar_type() == dtype && tensor.device() == device) {
    return tensor.detach().clone();
  }
  return tensor.detach().to(device, dtype);
}

absl::Status Differ(const char* what,
                    const std::vector<std::string>& differences) {
  if (differences.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " does not fit the model, which is as before:\n  ",
                   absl::StrJoin(differences, "\n  ")));
}

std::string DtypeDifference(c10::ScalarType from, c10::ScalarType to) {
  const bool is_floating = c10::isFloatingType(to);
  const bool fits =
      to == c10::kByte ? from == to : c10::isFloatingType(from) == is_floating;
  if (fits) return "";
  return absl::StrCat("dtype ", c10::toString(from), " instead of ",
                      is_floating        ? "a floating-point one"
                      : to == c10::kByte ? "Byte"
                                         : "an integral one");
}

std::string SizesText(at::IntArrayRef sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

absl::StatusOr<LoadPlan> PlanLoad(const NamedValues& values,
                                  const StateDict& dict, bool strict) {
  LoadPlan plan;
  std::vector<std::string> differences;
  std::set<std::string> known;
  std::map<Place, std::string> missing;
  for (const NamedValues::Parameter& parameter : values.parameters) {
    const Place place{parameter.place.flat, parameter.place.index};
    known.insert(parameter.name);
    const at::Tensor* value = dict.find(parameter.name);
    if (value == nullptr) {
      missing.emplace(place, parameter.name);
      continue;
    }
    CheckValue(parameter.name, *value,
               place.first->layout().parameter(place.second).sizes,
               place.first->dtype(), differences);
    plan.parameters.emplace(place, *value);
  }
  for (const NamedValues::Other& other : values.others) {
    known.insert(other.name);
    const at::Tensor* value = dict.find(other.name);
    if (value == nullptr) {
      if (strict) differences.push_back("missing: " + other.name);
      continue;
    }
    CheckValue(other.name, *value, other.tensor.sizes(), other.original,
               differences);
    if (value->defined() && value->sizes() == other.tensor.sizes() &&
        !CanHold(other.tensor, *value)) {
      differences.push_back(absl::StrCat(
          other.name, ": values differ where the model's buffer is expanded"));
    }
    plan.others.emplace_back(*value, other.tensor);
  }
  // Any name of a tied parameter will do.
  for (const auto& [place, name] : missing) {
    if (!strict || plan.parameters.count(place) > 0) continue;
    differences.push_back("missing: " + name);
  }
  for (const auto& item : dict) {
    if (!strict || known.count(item.key()) > 0) continue;
    differences.push_back("unexpected: " + item.key());
  }
  FSDP_RETURN_IF_ERROR(Differ("the state dict", differences));
  return plan;
}

// Copies this rank's part of `value` into the shard.
void TakeOwnRange(const FlatParameter& flat, int i, const at::Tensor& value) {
  c10::NoGradGuard no_grad;
  const flat_param::FlatLayout& layout = flat.layout();
  const Slice in_shard = layout.InShard(i, flat.rank());
  if (in_shard.empty()) return;
  const Slice range = layout.InParameter(i, flat.rank());
  const Resident resident =
      ValueOrThrow(Resident::Of(flat.shard(), Use::kUpdate));
  flat.shard()
      .narrow(0, in_shard.begin, in_shard.numel())
      .copy_(flat_param::StorageOrderOf(value, layout.parameter(i))
                 .narrow(0, range.begin, range.numel()));
}

void Apply(const LoadPlan& plan) {
  c10::NoGradGuard no_grad;
  for (const auto& [place, value] : plan.parameters) {
    TakeOwnRange(*place.first, place.second, value);
  }
  for (const auto& [from, to] : plan.others) {
    CopyInto(to, from);
  }
}

void AddOthers(const NamedValues& values, bool to_cpu, StateDict& dict) {
  for (const NamedValues::Other& other : values.others) {
    dict.insert(other.name, CopyOf(other.tensor, other.original, to_cpu));
  }
}

}  // namespace fsdp
