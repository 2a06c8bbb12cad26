#ifndef FSDP_RUNTIME_TESTING_RUNTIME_UNIT_H_
#define FSDP_RUNTIME_TESTING_RUNTIME_UNIT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/runtime.h"

// Makes the units of a Runtime, for tests of it alone.
namespace fsdp::testing {

// Returns one rank's flat parameter of copies of `tensors`, which are trained
// and named p0, p1 and so on.
std::unique_ptr<flat_param::FlatParameter> FlatOf(
    const std::vector<at::Tensor>& tensors, int world_size = 1, int rank = 0);

// Returns a unit without flat parameters.
RuntimeUnit EmptyUnit(std::string name, Placement placement);

// Adds a flat parameter of `parameters`, whose gradients become the mean over
// the ranks of `world` in the parameters' dtype.
void AddFlat(std::vector<flat_param::NamedParameter> parameters,
             c10::ScalarType compute_dtype, const comm::Communicator& world,
             RuntimeUnit& unit);

// Returns a unit "unit" with one float parameter "p".
RuntimeUnit UnitOf(const at::Tensor& parameter, Placement placement,
                   const comm::Communicator& world,
                   c10::ScalarType compute_dtype = c10::kFloat);

}  // namespace fsdp::testing

#endif  // FSDP_RUNTIME_TESTING_RUNTIME_UNIT_H_
