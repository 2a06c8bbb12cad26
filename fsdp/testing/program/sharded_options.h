// Options of FullyShard() that a Program asks for.
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

// How far numbers may be from plain LibTorch's: absolute and relative.
double ToleranceOf(const Program& program);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PROGRAM_SHARDED_OPTIONS_H_
