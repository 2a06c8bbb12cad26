// Fine-tunes a Llama, Qwen2 or Qwen3, sharded over ranks.
//   bazel run //examples/llama:train -- --help
#include <cstdint>
#include <iostream>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/newest_step.h"
#include "comm/communicator.h"
#include "comm/launcher/launcher_stop_request.h"
#include "comm/launcher/restart_options.h"
#include "comm/run_ranks/run_ranks.h"
#include "examples/llama/flags/train_flags.h"
#include "examples/llama/train_run.h"

int main(int argc, char** argv) {
  const fsdp::comm::StopRequest stop;
  const absl::StatusOr<llama::TrainFlags> flags =
      llama::ReadTrainFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status().message() << std::endl;
    return 2;
  }
  fsdp::comm::RestartOptions restarts;
  restarts.max_restarts = flags->max_restarts;
  restarts.progress = [&flags]() -> int64_t {
    const auto step = fsdp::checkpoint::NewestStep(flags->save);
    return step.ok() ? step->value_or(-1) : -1;
  };
  return fsdp::comm::RunRanks(
      argc, argv, flags->ranks,
      [&flags](std::shared_ptr<fsdp::comm::Communicator> ranks) {
        return llama::TrainRank(*flags, ranks);
      },
      /*options=*/{}, restarts);
}
