// usage: sample_writer FROM FORMAT PATH [RANKS]     (see WriteSample())
//
// FROM is what sample_reader reads, or "pattern".
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/testing/sample_tensors.h"

int main(int argc, char** argv) {
  namespace testing = fsdp::checkpoint::testing;
  const int ranks = argc == 5 ? std::atoi(argv[4]) : 1;
  if (argc < 4 || argc > 5 || ranks < 1) {
    std::fputs("usage: sample_writer FROM FORMAT PATH [RANKS]\n", stderr);
    return 2;
  }
  const std::string from = argv[1];
  absl::StatusOr<std::vector<testing::SampleTensor>> tensors =
      testing::PatternTensors();
  if (from != "pattern") tensors = testing::ReadSample(from);
  absl::Status status = tensors.status();
  if (status.ok()) {
    status = testing::WriteSample(*tensors, argv[2], argv[3], ranks);
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
