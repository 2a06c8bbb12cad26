#include <iostream>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/device_graph.h"
#include "examples/llama/flags/generate_flags.h"
#include "examples/llama/generate_run.h"

namespace llama {

int GenerateProgram(int argc, char** argv,
                    const fsdp::DeviceGraphMaker& make_graph) {
  const absl::StatusOr<GenerateFlags> flags = ReadGenerateFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status().message() << std::endl;
    return 2;
  }
  const absl::Status status =
      RunGenerate(*flags, std::cin, std::cout, std::cerr, make_graph);
  if (status.ok()) return 0;
  std::cerr << "generate: " << status.message() << std::endl;
  return 1;
}

}  // namespace llama
