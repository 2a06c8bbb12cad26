#ifndef FSDP_RUNTIME_TESTING_RUNTIME_UNIT_H_
#define FSDP_RUNTIME_TESTING_RUNTIME_UNIT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/runtime_common.h"

// Makes the units of a Runtime, for tests of it alone.
namespace fsdp::testing {

// Returns one rank's flat parameter of copies of `tensors`, which are trained
// and named p0, p1 and so on.
inline std::unique_ptr<flat_param::FlatParameter> FlatOf(
    const std::vector<at::Tensor>& tensors, int world_size = 1, int rank = 0) {
  std::vector<flat_param::NamedParameter> parameters;
  for (size_t i = 0; i < tensors.size(); ++i) {
    parameters.push_back(
        {absl::StrCat("p", i), {tensors[i].detach().clone().requires_grad_()}});
  }
  const c10::ScalarType dtype = tensors.front().scalar_type();
  auto layout = *flat_param::LayoutOf(parameters, dtype, world_size);
  const at::Tensor values =
      flat_param::FlatParameter::Flatten(parameters, layout);
  return std::make_unique<flat_param::FlatParameter>(
      std::move(parameters), std::move(layout), values, rank, dtype,
      "not gathered");
}

// Returns a unit without flat parameters.
inline RuntimeUnit EmptyUnit(std::string name, Placement placement) {
  return {std::move(name), std::move(placement), {}};
}

// Adds a flat parameter of `parameters`, whose gradients become the mean over
// the ranks of `world` in the parameters' dtype.
inline void AddFlat(std::vector<flat_param::NamedParameter> parameters,
                    c10::ScalarType compute_dtype,
                    const comm::Communicator& world, RuntimeUnit& unit) {
  const comm::Communicator& group = *unit.placement.shard;
  auto layout =
      *flat_param::LayoutOf(parameters, compute_dtype, group.world_size());
  const at::Tensor flat =
      flat_param::FlatParameter::Flatten(parameters, layout);
  const c10::ScalarType dtype = flat.scalar_type();
  RuntimeFlat& added = unit.flats.emplace_back();
  added.parameter = std::make_unique<flat_param::FlatParameter>(
      std::move(parameters), std::move(layout), flat, group.rank(),
      compute_dtype, "freed");
  added.gradients = {dtype, dtype, MeanOver(world.world_size(), dtype)};
}

}  // namespace fsdp::testing

#endif  // FSDP_RUNTIME_TESTING_RUNTIME_UNIT_H_
