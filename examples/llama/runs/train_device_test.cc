// The programs train and generate where the device is a fake: they write the
// bytes that they write on the CPU, wherever what they train rests, and also if
// steps are captured. Ranks are processes: this one, started again with a role.
#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "adapters/lora.h"
#include "base/json.h"
#include "base/testing/fake_device.h"
#include "base/testing/this_program.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/staged/staged_communicator.h"
#include "examples/llama/generate_run.h"
#include "examples/llama/testing/written_tokens.h"
#include "examples/llama/train_flags.h"
#include "examples/llama/train_run.h"
#include "examples/llama/training/model.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::RunThisProgram;
using ::testing::HasSubstr;

constexpr char kModel[] = "examples/llama/testing/recorded/qwen2";

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

c10::DeviceType TypeOf(const std::string& device) {
  return device == "fake" ? c10::DeviceType::PrivateUse1 : c10::DeviceType::CPU;
}

// A mode is what is trained, and after a "_" how.
TrainFlags FlagsOf(const std::string& mode, const std::string& folder) {
  const std::vector<std::string> words = absl::StrSplit(mode, '_');
  const std::string& what = words[0];
  const std::string how = words.size() > 1 ? words[1] : "";
  TrainFlags flags;
  flags.model = kModel;
  flags.data = Variable("TRAIN_DATA");
  flags.eval_data = flags.data;
  flags.device = TypeOf(Variable("TRAIN_DEVICE"));
  flags.ranks = std::atoi(Variable("TRAIN_RANKS").c_str());
  flags.threads = 1;
  flags.seq = 16;
  flags.batch = 4;
  flags.trainer.schedule = {/*warm_up=*/0, /*steps=*/5, /*floor=*/0.1};
  flags.trainer.learning_rate = 1e-2;
  flags.precision = c10::kFloat;
  flags.metrics = folder + "/metrics";
  flags.save = folder + "/save";
  flags.save_every = 2;
  flags.keep_last = 0;
  if (!Variable("TRAIN_RESUME").empty()) flags.resume = Resume::kRequired;
  flags.export_dir = folder + "/exported";
  // Captured steps have learning rates that are floats.
  if (what == "steady") {
    flags.trainer.learning_rate = 0.0078125;
    flags.trainer.schedule.floor = 1;
  }
  ModelOptions& made = flags.made;
  if (what == "accumulate" || what == "steady") {
    flags.trainer.micro_batches = 2;
    made.recompute = true;
  }
  if (what == "lora" || what == "int8") {
    made.lora.emplace().rank = 2;
    made.lora->targets = {std::string(fsdp::adapters::kAllLinear)};
    made.lora->task_type = "CAUSAL_LM";
    flags.save_adapter = folder + "/adapter";
  }
  if (what == "int8") made.int8_base.emplace().block = 16;
  if (how == "dropout") made.lora->dropout = 0.5, made.recompute = true;
  if (how == "dynamic") {
    flags.model = folder;
    flags.from_scratch = true;
  }
  flags.capture = how == "capture" || how == "dropout" || how == "dynamic";
  if (how == "auto") {
    made.automatic.emplace().memory_bytes = int64_t{1} << 30;
    made.automatic->host_bytes = int64_t{1} << 30;
  }
  const std::string tiers = how == "cpu"                       ? "cpu"
                            : how == "ssd" || how == "nowhere" ? "ssd"
                            : how == "mixed" ? "parameters=ssd,optimizer=cpu"
                                             : "none";
  made.offload = *ParseOffload(tiers);
  if (made.automatic || made.offload.parameters == fsdp::Tier::kSsd) {
    made.offload.directory = folder + (how == "nowhere" ? "/nowhere" : "");
  }
  return flags;
}

// Makes a group of one rank that can be captured, as one of NCCL can.
fsdp::comm::ConnectDevice Alone(c10::Device device) {
  return [device](const fsdp::comm::DeviceMeeting& meeting) {
    fsdp::comm::LoopbackOptions options;
    options.device = device;
    options.timeout = meeting.timeout;
    return fsdp::comm::CreateLoopback(options);
  };
}

int Train(int argc, char** argv) {
  const TrainFlags flags =
      FlagsOf(Variable("TRAIN_ROLE"), Variable("TRAIN_FOLDER"));
  fsdp::comm::NcclOn backend;
  if (flags.ranks > 1) backend = fsdp::comm::StagedBackend;
  if (flags.ranks == 1 && flags.capture) backend = Alone;
  const auto device =
      fsdp::comm::ChooseDeviceOfProcess(flags.device, flags.ranks, backend);
  if (!device.ok()) {
    std::cerr << device.status() << std::endl;
    return 1;
  }
  fsdp::comm::ConnectOptions connect;
  connect.device = device->connect;
  return fsdp::comm::RunRanks(
      argc, argv, flags.ranks,
      [&](const auto& ranks) {
        return TrainRank(flags, device->device, ranks,
                         fsdp::testing::FakeDeviceGraph::Make);
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
  const absl::Status status = RunGenerate(flags, none, std::cout, log,
                                          fsdp::testing::FakeDeviceGraph::Make);
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

ProgramOutcome RunIn(const std::string& folder, const std::string& device,
                     const std::string& mode, int ranks,
                     const std::string& more = "") {
  WrittenTokens tokens;
  tokens.vocab_size = 128;
  for (int64_t i = 0; i < 800; ++i) tokens.tokens.push_back(i * i % 97);
  return RunThisProgram(
      absl::StrCat("TRAIN_ROLE=", mode, " TRAIN_DEVICE=", device,
                   " TRAIN_RANKS=", ranks, " TRAIN_FOLDER=", folder,
                   " TRAIN_DATA=", WriteTokens("tokens", tokens), " ", more));
}

std::string EmptyFolder(const std::string& device, const std::string& mode,
                        int ranks) {
  std::string folder =
      absl::StrCat(::testing::TempDir(), "/", mode, "_", device, "_", ranks);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

// Runs the role on a device and returns the folder with what it has written.
std::string RunOn(const std::string& device, const std::string& mode,
                  int ranks) {
  std::string folder = EmptyFolder(device, mode, ranks);
  const ProgramOutcome outcome = RunIn(folder, device, mode, ranks);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  return folder;
}

void ExpectSameFiles(const std::string& folder, const std::string& expected) {
  for (const char* const file :
       {"/exported/model.safetensors", "/save/step-5/model.safetensors",
        "/save/step-5/optimizer/exp_avg.safetensors",
        "/adapter/adapter_model.safetensors"}) {
    EXPECT_EQ(std::filesystem::exists(folder + file),
              std::filesystem::exists(expected + file));
    EXPECT_TRUE(Contents(folder + file) == Contents(expected + file)) << file;
  }
}

class TrainDeviceTest : public ::testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(Modes, TrainDeviceTest,
                         ::testing::Values("full", "accumulate", "lora", "int8",
                                           "full_cpu", "full_ssd",
                                           "accumulate_mixed", "lora_ssd",
                                           "int8_cpu", "steady_capture"),
                         [](const auto& info) { return info.param; });

TEST_P(TrainDeviceTest, WritesTheBytesThatItWritesOnTheCpu) {
  const std::string& mode = GetParam();
  const std::vector<std::string> words = absl::StrSplit(mode, '_');
  for (const int ranks : {1, 2}) {
    // Groups of several ranks go through the host, which is not captured.
    if (absl::EndsWith(mode, "_capture") && ranks > 1) continue;
    const std::string cpu = RunOn("cpu", words[0], ranks);
    const std::string fake = RunOn("fake", mode, ranks);
    const std::vector<double> losses = LossesIn(Contents(cpu + "/metrics"));
    EXPECT_EQ(losses.size(), 11);  // of 5 steps, and of the evaluation
    EXPECT_EQ(LossesIn(Contents(fake + "/metrics")), losses);
    ExpectSameFiles(fake, cpu);
  }
}

TEST(TrainTiersTest, ARunGoesOnWithWhatRestsElsewhereThanBefore) {
  const std::string cpu = RunOn("cpu", "full", 2);
  const std::string folder = RunOn("fake", "full_cpu", 2);
  for (const char* const written : {"save/step-5", "save/step-4", "exported"}) {
    EXPECT_GT(std::filesystem::remove_all(folder + "/" + written), 0);
  }
  const ProgramOutcome outcome =
      RunIn(folder, "fake", "full_ssd", 2, "TRAIN_RESUME=1");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("goes on after step 2"));
  ExpectSameFiles(folder, cpu);
}

// Other units may have other last bits.
TEST(TrainTiersTest, WhatIsChosenForADeviceTrainsAlike) {
  const std::string cpu = RunOn("cpu", "int8", 1);
  const std::string folder = EmptyFolder("fake", "int8_auto", 1);
  const ProgramOutcome outcome = RunIn(folder, "fake", "int8_auto", 1);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("chosen"));
  EXPECT_THAT(LossesIn(Contents(folder + "/metrics")),
              ::testing::Pointwise(::testing::DoubleNear(1e-3),
                                   LossesIn(Contents(cpu + "/metrics"))));
}

TEST(TrainTiersTest, RefusesBeforeTheFirstStepWhatCannotBe) {
  const std::pair<std::string, std::string> cases[] = {
      {"full_nowhere", "/nowhere: there is no such folder"},
      {"lora_dropout", "--capture with --recompute or --auto and adapters"},
      {"full_dynamic", "--capture of a model whose rope_scaling is dynamic"},
      {"full_capture",
       "--capture: a step of this model cannot be captured: operations of the "
       "group"}};
  for (const auto& [mode, text] : cases) {
    const std::string folder = EmptyFolder("fake", mode, 2);
    std::ofstream(folder + "/config.json") << R"({"model_type": "llama",
        "vocab_size": 128, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 1,
        "rope_scaling": {"type": "dynamic", "factor": 2}})";
    const ProgramOutcome outcome = RunIn(folder, "fake", mode, 2);
    EXPECT_NE(outcome.code, 0);
    EXPECT_THAT(outcome.output, HasSubstr(text));
    EXPECT_FALSE(std::filesystem::exists(folder + "/metrics"));
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
