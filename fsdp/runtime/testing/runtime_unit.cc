#include "fsdp/runtime/testing/runtime_unit.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp::testing {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::NamedParameter;

std::unique_ptr<FlatParameter> FlatOf(const std::vector<at::Tensor>& tensors,
                                      int world_size, int rank) {
  std::vector<NamedParameter> parameters;
  for (size_t i = 0; i < tensors.size(); ++i) {
    parameters.push_back(
        {absl::StrCat("p", i), {tensors[i].detach().clone().requires_grad_()}});
  }
  const c10::ScalarType dtype = tensors.front().scalar_type();
  auto layout = *flat_param::LayoutOf(parameters, dtype, world_size);
  const at::Tensor values = FlatParameter::Flatten(parameters, layout);
  return std::make_unique<FlatParameter>(std::move(parameters),
                                         std::move(layout), values, rank, dtype,
                                         "not gathered");
}

RuntimeUnit EmptyUnit(std::string name, Placement placement) {
  RuntimeUnit unit;
  unit.name = std::move(name);
  unit.placement = std::move(placement);
  return unit;
}

void AddFlat(std::vector<NamedParameter> parameters,
             c10::ScalarType compute_dtype, const comm::Communicator& world,
             RuntimeUnit& unit) {
  const comm::Communicator& group = *unit.placement.shard;
  auto layout =
      *flat_param::LayoutOf(parameters, compute_dtype, group.world_size());
  const at::Tensor flat = FlatParameter::Flatten(parameters, layout);
  const c10::ScalarType dtype = flat.scalar_type();
  RuntimeFlat& added = unit.flats.emplace_back();
  added.parameter = std::make_unique<FlatParameter>(
      std::move(parameters), std::move(layout), flat, group.rank(),
      compute_dtype, "freed");
  added.gradients = {dtype, dtype, MeanOver(world.world_size(), dtype)};
}

RuntimeUnit UnitOf(const at::Tensor& parameter, Placement placement,
                   const comm::Communicator& world,
                   c10::ScalarType compute_dtype) {
  RuntimeUnit unit = EmptyUnit("unit", std::move(placement));
  AddFlat({{"p", {parameter}}}, compute_dtype, world, unit);
  return unit;
}

}  // namespace fsdp::testing
