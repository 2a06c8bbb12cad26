// Ranks share a device, a process each, and exchange by way of host memory: the
// fake device, or with ON_GPU a GPU.
#include <c10/core/DeviceGuard.h>
#include <c10/core/DeviceType.h>

#include <cmath>
#include <cstdlib>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/launcher/launcher.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/startup/environment.h"
#include "comm/testing/staged/staged_communicator.h"
#include "fsdp/options/offload_options.h"
#include "testing/gpt/model.h"
#include "testing/gpt/testing/plain_training.h"
#include "testing/gpt/trainer.h"

namespace gpt {
namespace {

using ::fsdp::testing::FakeDevice;

#ifdef ON_GPU
constexpr c10::DeviceType kDevice = c10::kCUDA;
constexpr double kTolerance = 1e-3;  // of losses, relative to plain training
#else
constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
constexpr double kTolerance = 1e-5;
#endif

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
    c10::Device device, const std::string& offload,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  Gpt model(kModel);
  InitializeParameters(*model, kSeed);
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("moving the model", [&] {
    if (device.is_cuda()) {
      model->to(device);
    } else {
      FakeDevice::Move(model->parameters());
    }
  }));
  TrainOptions options;
  options.model = kModel;
  options.warmup = 0;
  options.steps = kSteps;
  options.offload = OffloadTo(offload);
  FSDP_ASSIGN_OR_RETURN(TrainableModel sharded,
                        MakeTrainable(options, model, ranks));
  Batches data(kModel.vocab, kShape,
               {ranks->rank(), ranks->world_size(), device});
  TrainerContext context;
  // The first two steps allocate.
  context.on_step = [&](int64_t step, double /*loss*/) {
    if (step == 2 && !device.is_cuda()) FakeDevice::Reset();
  };
  FSDP_ASSIGN_OR_RETURN(const TrainingResult result,
                        Train(options, context, sharded, data, ranks));
  return result.mean_losses;
}

// Checks the steps since the last Reset().
absl::Status CheckStreams() {
  const std::vector<std::string> races = FakeDevice::Races();
  const std::vector<std::string> waits = FakeDevice::HostWaits();
  if (races.empty() && waits.empty()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("races:\n", absl::StrJoin(races, "\n"), "\nwaits:\n",
                   absl::StrJoin(waits, "\n")));
}

absl::Status CompareWithPlain(const std::vector<double>& losses, int ranks) {
  const std::vector<double> plain =
      testing::PlainLosses({kModel, kShape, ranks, kSteps, kSeed});
  if (losses.size() != plain.size()) {
    return absl::InternalError(absl::StrCat(losses.size(), " losses"));
  }
  for (size_t i = 0; i < plain.size(); ++i) {
    if (std::abs(losses[i] - plain[i]) <= kTolerance * plain[i]) continue;
    return absl::InternalError(absl::StrCat("the loss of step ", i + 1, " is ",
                                            losses[i], " and should be ",
                                            plain[i]));
  }
  return absl::OkStatus();
}

absl::Status RunRank(const std::string& offload) {
  FSDP_ASSIGN_OR_RETURN(const fsdp::comm::Environment environment,
                        fsdp::comm::ReadEnvironment(std::getenv));
  FSDP_ASSIGN_OR_RETURN(const fsdp::comm::DeviceChoice device,
                        fsdp::comm::ChooseDevice(kDevice, environment,
                                                 fsdp::comm::StagedBackend));
  fsdp::comm::ConnectOptions connect;
  connect.connect_timeout = connect.timeout = absl::Seconds(60);
  connect.device = device.connect;
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<fsdp::comm::Communicator> ranks,
                        fsdp::comm::Connect(environment, connect));
  const c10::DeviceGuard guard(device.device);
  absl::StatusOr<std::vector<double>> losses =
      Losses(device.device, offload, ranks);
  if (!losses.ok()) {
    ranks->Abort(losses.status());
    return losses.status();
  }
  if (!device.device.is_cuda()) FSDP_RETURN_IF_ERROR(CheckStreams());
  return CompareWithPlain(*losses, environment.world_size);
}

// Starts this program once more for each rank. Errors are on standard error.
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

class TrainerDeviceTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, TrainerDeviceTest, ::testing::Values(1, 2, 3));

TEST_P(TrainerDeviceTest, LossesAreThoseOfTheCpuAndTheHostWaitsForNothing) {
  for (const char* offload : {"none", "cpu", "ssd"}) {
    EXPECT_OK(TrainInProcesses(GetParam(), offload)) << offload;
  }
}

int TestOrRank(int argc, char** argv) {
  const char* offload = std::getenv(kOffload);
  if (offload == nullptr) {
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
  }
  const absl::Status status = RunRank(offload);
  if (!status.ok()) std::cerr << status << std::endl;
  return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
#ifndef ON_GPU
  fsdp::testing::FakeDevice::Register();
#endif
  return gpt::TestOrRank(argc, argv);
}
