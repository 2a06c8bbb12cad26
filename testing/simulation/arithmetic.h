// What collectives compute, as their contract says it and as slowly as that:
// the simulated network owes nothing to the code that other backends share.
#ifndef TESTING_SIMULATION_ARITHMETIC_H_
#define TESTING_SIMULATION_ARITHMETIC_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/call.h"
#include "comm/communicator.h"

namespace fsdp::simulation {

// `count` elements of each input, reduced in the order of the inputs. Halves
// are added as float32 and rounded once.
std::vector<char> ReduceInOrder(at::ScalarType dtype, comm::ReduceOp op,
                                const std::vector<const char*>& inputs,
                                int64_t count);

// What `sum` of `dtype` makes of `before`, of `out_dtype`.
std::vector<char> ScaleInto(at::ScalarType dtype, const std::vector<char>& sum,
                            comm::ScaledSum scaled, at::ScalarType out_dtype,
                            const std::vector<char>& before);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_ARITHMETIC_H_
