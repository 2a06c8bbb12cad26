// usage: dcp_training save|load FOLDER OPTIMIZER
//
// Trains a small model on three ranks, saves a checkpoint in FOLDER, or loads
// the one that is there, goes on, and prints the losses from there, one a line
// (see dcp_run.h).
#include <cstdio>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/testing/dcp_run.h"

int main(int argc, char** argv) {
  namespace testing = fsdp::checkpoint::testing;
  const std::string what = argc == 4 ? argv[1] : "";
  if (what != "save" && what != "load") {
    std::fputs("usage: dcp_training save|load FOLDER OPTIMIZER\n", stderr);
    return 2;
  }
  testing::DcpRun run;
  run.folder = argv[2];
  run.optimizer = argv[3];
  const absl::StatusOr<std::vector<double>> losses =
      what == "load" ? testing::LoadAndGoOn(run) : testing::SaveAndGoOn(run);
  if (!losses.ok()) {
    std::fprintf(stderr, "%s\n", losses.status().ToString().c_str());
    return 1;
  }
  for (const double loss : *losses) std::printf("%.9g\n", loss);
  return 0;
}
