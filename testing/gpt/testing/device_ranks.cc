#include "testing/gpt/testing/device_ranks.h"

#include <c10/core/DeviceGuard.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/launcher/launcher.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/startup/environment.h"
#include "comm/testing/staged/staged_communicator.h"
#include "fsdp/options/offload_options.h"
#include "gtest/gtest.h"
#include "testing/gpt/data/batch.h"
#include "testing/gpt/data/count_data.h"
#include "testing/gpt/data/device_batches.h"
#include "testing/gpt/flags/options.h"
#include "testing/gpt/model/model.h"
#include "testing/gpt/model/trainable_model.h"
#include "testing/gpt/testing/plain_training.h"
#include "testing/gpt/training/trainer.h"

namespace gpt::testing {
namespace {

constexpr char kOffload[] = "DEVICE_RANKS_OFFLOAD";
constexpr GptConfig kModel{/*vocab=*/37, /*dim=*/24, /*layers=*/3, /*heads=*/3,
                           /*seq=*/10};
constexpr BatchShape kShape{/*batch=*/2, /*seq=*/10};
constexpr int64_t kSteps = 6;
constexpr uint64_t kSeed = 3;

fsdp::OffloadOptions OffloadTo(const std::string& name) {
  fsdp::OffloadOptions offload;
  const fsdp::Tier tier = name == "cpu"   ? fsdp::Tier::kCpu
                          : name == "ssd" ? fsdp::Tier::kSsd
                                          : fsdp::Tier::kDevice;
  offload.parameters = offload.gradients = offload.optimizer = tier;
  if (name == "ssd") offload.directory = ::testing::TempDir();
  return offload;
}

absl::StatusOr<std::vector<double>> Losses(
    const SharedDevice& shared, c10::Device device, const std::string& offload,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  Gpt model(kModel);
  InitializeParameters(*model, kSeed);
  FSDP_RETURN_IF_ERROR(
      fsdp::TorchToStatus("moving the model", [&] { shared.move(*model); }));
  const int rank = ranks->rank();
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<TrainableModel> sharded,
                        MakeSharded(model, ranks, Sharding::kFull,
                                    ComputeDtype::kFloat, OffloadTo(offload)));
  DeviceBatches data(std::make_unique<CountData>(kModel.vocab, kShape, rank),
                     device);
  TrainerOptions options;
  options.steps = kSteps;
  options.on_step = [&](int64_t step, double /*loss*/) {
    if (step == 2) shared.begin();
  };
  FSDP_ASSIGN_OR_RETURN(TrainingResult result,
                        Train(options, *sharded, data, *ranks));
  return std::move(result.mean_losses);
}

absl::Status CompareWithPlain(const std::vector<double>& losses, int ranks,
                              double tolerance) {
  const std::vector<double> plain =
      PlainLosses({kModel, kShape, ranks, kSteps, kSeed});
  if (losses.size() != plain.size()) {
    return absl::InternalError(absl::StrCat(losses.size(), " losses"));
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    if (std::abs(losses[i] - plain[i]) <= tolerance * plain[i]) continue;
    return absl::InternalError(absl::StrCat("the loss of step ", i + 1, " is ",
                                            losses[i], " and should be ",
                                            plain[i]));
  }
  return absl::OkStatus();
}

absl::Status RunRank(const SharedDevice& shared, const std::string& offload) {
  FSDP_ASSIGN_OR_RETURN(const fsdp::comm::Environment environment,
                        fsdp::comm::ReadEnvironment(std::getenv));
  FSDP_ASSIGN_OR_RETURN(const fsdp::comm::DeviceChoice device,
                        fsdp::comm::ChooseDevice(shared.type, environment,
                                                 fsdp::comm::StagedBackend));
  fsdp::comm::ConnectOptions connect;
  connect.connect_timeout = connect.timeout = absl::Seconds(60);
  connect.device = device.connect;
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<fsdp::comm::Communicator> ranks,
                        fsdp::comm::Connect(environment, connect));
  const c10::DeviceGuard guard(device.device);
  absl::StatusOr<std::vector<double>> losses =
      Losses(shared, device.device, offload, ranks);
  if (!losses.ok()) {
    ranks->Abort(losses.status());
    return losses.status();
  }
  FSDP_RETURN_IF_ERROR(shared.end());
  return CompareWithPlain(*losses, environment.world_size, shared.tolerance);
}

}  // namespace

absl::Status TrainInProcesses(int ranks, const std::string& offload) {
  fsdp::comm::LaunchOptions launch;
  launch.ranks = ranks;
  launch.argv = {"rank"};
  launch.environment = {{kOffload, offload}};
  FSDP_ASSIGN_OR_RETURN(const fsdp::comm::LaunchReport report,
                        fsdp::comm::LaunchRanks(launch));
  return report.exit_code() == 0 ? absl::OkStatus()
                                 : absl::InternalError(report.ToString());
}

int TestOrRank(int argc, char** argv, const SharedDevice& device) {
  const char* offload = std::getenv(kOffload);
  if (offload == nullptr) {
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  const absl::Status status = RunRank(device, offload);
  if (!status.ok()) std::cerr << status << std::endl;
  return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace gpt::testing
