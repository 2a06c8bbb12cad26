// Compares, copies and refuses values, for both kinds of state dicts.
#ifndef FSDP_STATE_STATE_DICT_LOAD_H_
#define FSDP_STATE_STATE_DICT_LOAD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/named_values.h"
#include "fsdp/state/state_dict.h"

namespace fsdp {

// A parameter by its flat parameter and index there.
using Place = std::pair<const flat_param::FlatParameter*, int>;

// The values of a dict that are to be loaded.
struct LoadPlan {
  std::map<Place, at::Tensor> parameters;
  std::vector<std::pair<at::Tensor, at::Tensor>> others;  // from, to
};

// Plans to load `dict`; any name of a tied parameter will do. InvalidArgument
// lists every difference.
absl::StatusOr<LoadPlan> PlanLoad(const NamedValues& values,
                                  const StateDict& dict, bool strict);
void Apply(const LoadPlan& plan);
// Copies this rank's part of the whole `value` of parameter `i` into the shard.
void TakeOwnRange(const flat_param::FlatParameter& flat, int i,
                  const at::Tensor& value);

// Overwrites the model's shards, in the order of its flat parameters. Throws.
void OverwriteShards(ShardedModel& model, absl::Span<const at::Tensor> shards);

at::Tensor CopyOf(const at::Tensor& tensor, c10::ScalarType dtype, bool to_cpu);
void AddOthers(const NamedValues& values, bool to_cpu, StateDict& dict);

// OK if there are no `differences`, else InvalidArgument with a line for each.
absl::Status Differ(const char* what,
                    const std::vector<std::string>& differences);
// Returns why values of dtype `from` cannot be cast to `to`, or an empty string
// if they can. Only bytes become bytes.
std::string DtypeDifference(c10::ScalarType from, c10::ScalarType to);
// Returns "[2, 3]".
std::string SizesText(at::IntArrayRef sizes);

}  // namespace fsdp

#endif  // FSDP_STATE_STATE_DICT_LOAD_H_
