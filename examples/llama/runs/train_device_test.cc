// The programs train and generate where the device is a fake: they write the
// bytes that they write on the CPU. Ranks are processes: this one, started
// again with a role.
#include <ATen/Context.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "adapters/lora.h"
#include "base/json.h"
#include "base/testing/fake_device.h"
#include "base/testing/this_program.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/testing/staged/staged_communicator.h"
#include "examples/llama/flags/generate_flags.h"
#include "examples/llama/flags/train_flags.h"
#include "examples/llama/generate_run.h"
#include "examples/llama/testing/written_tokens.h"
#include "examples/llama/train_run.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::RunThisProgram;

constexpr char kModel[] = "examples/llama/testing/recorded/qwen2";

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

c10::DeviceType TypeOf(const std::string& device) {
  return device == "fake" ? c10::DeviceType::PrivateUse1 : c10::DeviceType::CPU;
}

TrainFlags FlagsOf(const std::string& mode, const std::string& folder) {
  TrainFlags flags;
  flags.model = kModel;
  flags.data = Variable("TRAIN_DATA");
  flags.eval_data = flags.data;
  flags.device = TypeOf(Variable("TRAIN_DEVICE"));
  flags.ranks = std::atoi(Variable("TRAIN_RANKS").c_str());
  flags.threads = 1;
  flags.seq = 16;
  flags.batch = 4;
  flags.steps = 4;
  flags.lr = 1e-2;
  flags.warmup = 0;
  flags.precision = Precision::kFloat;
  flags.metrics = folder + "/metrics";
  flags.save = folder + "/save";
  flags.export_dir = folder + "/exported";
  if (mode == "accumulate") flags.micro_batches = 2, flags.recompute = true;
  if (mode == "lora" || mode == "int8") {
    flags.lora.emplace().rank = 2;
    flags.lora->targets = {std::string(fsdp::adapters::kAllLinear)};
    flags.lora->task_type = "CAUSAL_LM";
    flags.save_adapter = folder + "/adapter";
  }
  if (mode == "int8") flags.base = Base::kInt8, flags.base_block = 16;
  return flags;
}

int Train(int argc, char** argv) {
  const TrainFlags flags =
      FlagsOf(Variable("TRAIN_ROLE"), Variable("TRAIN_FOLDER"));
  const fsdp::comm::NcclOn none;
  const auto device = fsdp::comm::ChooseDeviceOfProcess(
      flags.device, flags.ranks,
      flags.ranks == 1 ? none : fsdp::comm::StagedBackend);
  if (!device.ok()) {
    std::cerr << device.status() << std::endl;
    return 1;
  }
  fsdp::comm::ConnectOptions connect;
  connect.device = device->connect;
  return fsdp::comm::RunRanks(
      argc, argv, flags.ranks,
      [&](const auto& ranks) {
        return TrainRank(flags, device->device, ranks);
      },
      connect);
}

int Generate() {
  GenerateFlags flags;
  flags.model = kModel;
  flags.tokens = "5,6,7";
  flags.max_tokens = 12;
  flags.threads = 1;
  flags.device = TypeOf(Variable("TRAIN_DEVICE"));
  std::istringstream none;
  std::ostringstream log;
  const absl::Status status = RunGenerate(flags, none, std::cout, log);
  if (!status.ok()) std::cout << status << std::endl;
  return status.ok() ? 0 : 1;
}

std::string Contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<double> LossesIn(const std::string& metrics) {
  std::vector<double> losses;
  for (const absl::string_view line :
       absl::StrSplit(metrics, '\n', absl::SkipEmpty())) {
    const auto json = fsdp::Json::Parse(line);
    if (!json.ok()) continue;
    for (const char* const name : {"loss", "eval_loss", "grad_norm"}) {
      if (const fsdp::Json* number = json->Find(name)) {
        losses.push_back(number->NumberOr(-1));
      }
    }
  }
  return losses;
}

// Runs the role on a device and returns the folder with what it has written.
std::string RunOn(const std::string& device, const std::string& mode,
                  int ranks) {
  std::string folder =
      absl::StrCat(::testing::TempDir(), "/", mode, "_", device, "_", ranks);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  WrittenTokens tokens;
  tokens.vocab_size = 128;
  for (int64_t i = 0; i < 800; ++i) tokens.tokens.push_back(i * i % 97);
  const ProgramOutcome outcome = RunThisProgram(absl::StrCat(
      "TRAIN_ROLE=", mode, " TRAIN_DEVICE=", device, " TRAIN_RANKS=", ranks,
      " TRAIN_FOLDER=", folder, " TRAIN_DATA=", WriteTokens("tokens", tokens)));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  return folder;
}

class TrainDeviceTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Modes, TrainDeviceTest,
                         ::testing::Values("full", "accumulate", "lora",
                                           "int8"),
                         [](const auto& info) { return info.param; });

TEST_P(TrainDeviceTest, WritesTheBytesThatItWritesOnTheCpu) {
  for (const int ranks : {1, 2}) {
    const std::string cpu = RunOn("cpu", GetParam(), ranks);
    const std::string fake = RunOn("fake", GetParam(), ranks);
    const std::vector<double> losses = LossesIn(Contents(cpu + "/metrics"));
    EXPECT_EQ(losses.size(), 9);  // of 4 steps, and of the evaluation
    EXPECT_EQ(LossesIn(Contents(fake + "/metrics")), losses);
    for (const char* const file :
         {"/exported/model.safetensors", "/save/step-4/model.safetensors",
          "/save/step-4/optimizer/exp_avg.safetensors",
          "/adapter/adapter_model.safetensors"}) {
      EXPECT_EQ(std::filesystem::exists(cpu + file),
                std::filesystem::exists(fake + file));
      EXPECT_TRUE(Contents(cpu + file) == Contents(fake + file)) << file;
    }
  }
}

TEST(GenerateDeviceTest, ContinuesWithTheTokensOfTheCpu) {
  const ProgramOutcome cpu =
      RunThisProgram("TRAIN_ROLE=generate TRAIN_DEVICE=cpu");
  EXPECT_EQ(cpu.code, 0) << cpu.output;
  EXPECT_FALSE(cpu.output.empty());
  const ProgramOutcome fake =
      RunThisProgram("TRAIN_ROLE=generate TRAIN_DEVICE=fake");
  EXPECT_EQ(fake.code, 0);
  EXPECT_EQ(fake.output, cpu.output);
}

}  // namespace

int PlayRole(int argc, char** argv, const std::string& role) {
  FakeDevice::Register();
  // Only the CPU has it, and it rounds otherwise.
  at::globalContext().setSDPUseFlash(false);
  return role == "generate" ? Generate() : Train(argc, argv);
}

}  // namespace llama

int main(int argc, char** argv) {
  if (const char* const role = std::getenv("TRAIN_ROLE")) {
    return llama::PlayRole(argc, argv, role);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
