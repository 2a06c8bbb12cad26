// Computes what collectives do, as slowly as their contract says it: the
// simulated network owes nothing to the code that other backends share.
#ifndef TESTING_SIMULATION_ARITHMETIC_H_
#define TESTING_SIMULATION_ARITHMETIC_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace fsdp::simulation {

// Reduces `count` elements of each input in the order of the inputs. Halves are
// added as float32 and rounded once.
std::vector<char> ReduceInOrder(at::ScalarType dtype, comm::ReduceOp op,
                                const std::vector<const char*>& inputs,
                                int64_t count);

// Returns what `scaled` makes of `before`, of `out_dtype`, and `sum`, of
// `dtype`.
std::vector<char> ScaleInto(at::ScalarType dtype, const std::vector<char>& sum,
                            comm::ScaledSum scaled, at::ScalarType out_dtype,
                            const std::vector<char>& before);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_ARITHMETIC_H_
