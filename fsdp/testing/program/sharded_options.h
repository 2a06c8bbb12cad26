// The options of FullyShard() for a Program.
#ifndef FSDP_TESTING_PROGRAM_SHARDED_OPTIONS_H_
#define FSDP_TESTING_PROGRAM_SHARDED_OPTIONS_H_

#include <string>
#include <vector>

#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/program/program.h"

namespace fsdp::testing {

Options OptionsOf(const Program& program, const std::string& directory);
std::vector<comm::MeshDimension> MeshOf(const Program& program);

// Returns the tolerance to plain LibTorch's numbers, absolute and relative.
double ToleranceOf(const Program& program);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_SHARDED_OPTIONS_H_
