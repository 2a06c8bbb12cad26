// usage: sample_reader PATH     (see ReadSample())
//
// Prints LineOf() of each tensor.
#include <cstdio>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/testing/sample_tensors.h"

int main(int argc, char** argv) {
  using fsdp::checkpoint::testing::SampleTensor;
  if (argc != 2) {
    std::fputs("usage: sample_reader PATH\n", stderr);
    return 2;
  }
  const absl::StatusOr<std::vector<SampleTensor>> tensors =
      fsdp::checkpoint::testing::ReadSample(argv[1]);
  if (!tensors.ok()) {
    std::fprintf(stderr, "%s\n", tensors.status().ToString().c_str());
    return 1;
  }
  for (const SampleTensor& tensor : *tensors) {
    std::puts(fsdp::checkpoint::testing::LineOf(tensor).c_str());
  }
  return 0;
}
