// The program train where the device is a fake: it writes the bytes that it
// writes on the CPU, wherever what it trains rests, and also if steps are
// captured. Ranks are processes: this one, started again with a role.
#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/substitute.h"
#include "base/files/testing/real_files.h"
#include "base/json.h"
#include "base/testing/fake_device.h"
#include "base/testing/parsed_flags.h"
#include "base/testing/this_program.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/staged/staged_communicator.h"
#include "examples/llama/testing/written_tokens.h"
#include "examples/llama/train_run.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::EmptyFolder;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::ReadWholeFile;
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

// The flags of a mode, which is what is trained and after a "_" how. $0 is a
// folder. Captured steps have learning rates that are floats.
std::string FlagsOf(const std::string& mode) {
  static const auto* const flags = new std::map<std::string, std::string>{
      {"full", "--lr=0.01"},
      {"accumulate", "--lr=0.01 --micro_batches=2 --recompute"},
      {"steady", "--lr=0.0078125 --lr_floor=1 --micro_batches=2 --recompute"},
      {"lora", "--lr=0.01 --lora_rank=2 --save_adapter=$0/adapter"},
      {"int8",
       "--lr=0.01 --lora_rank=2 --save_adapter=$0/adapter --base=int8 "
       "--base_block=16"},
      {"capture", "--capture"},
      {"dropout", "--capture --lora_dropout=0.5 --recompute"},
      {"dynamic", "--capture --model=$0 --from_scratch"},
      {"auto", "--auto --auto_memory=1 --auto_host=1 --offload_dir=$0"},
      {"cpu", "--offload=cpu"},
      {"ssd", "--offload=ssd --offload_dir=$0"},
      {"nowhere", "--offload=ssd --offload_dir=$0/nowhere"},
      {"mixed", "--offload=parameters=ssd,optimizer=cpu --offload_dir=$0"}};
  std::string all;
  for (const absl::string_view word : absl::StrSplit(mode, '_')) {
    absl::StrAppend(&all, " ", flags->at(std::string(word)));
  }
  return all;
}

TrainFlags ReadFlags() {
  const std::string line = absl::Substitute(
      absl::StrCat(
          "train --model=", kModel, " --device=cuda --data=$1 --eval_data=$1 ",
          "--ranks=$2 --threads=1 --precision=fp32 --seq=16 --batch=4 ",
          "--warmup=0 --steps=5 --metrics=$0/metrics --save=$0/save ",
          "--save_every=2 --keep_last=0 --export=$0/exported --resume=$3",
          FlagsOf(Variable("TRAIN_ROLE"))),
      Variable("TRAIN_FOLDER"), Variable("TRAIN_DATA"), Variable("TRAIN_RANKS"),
      Variable("TRAIN_RESUME").empty() ? "false" : "required");
  TrainFlags flags =
      fsdp::ValueOrThrow(fsdp::testing::ParsedBy(ReadTrainFlags, line));
  flags.device = TypeOf(Variable("TRAIN_DEVICE"));
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
  const TrainFlags flags = ReadFlags();
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

// Runs the role on a device and returns the folder with what it has written.
std::string RunOn(const std::string& device, const std::string& mode,
                  int ranks) {
  std::string folder = EmptyFolder(absl::StrCat(mode, "_", device, "_", ranks));
  const ProgramOutcome outcome = RunIn(folder, device, mode, ranks);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  return folder;
}

void ExpectSameFiles(const std::string& folder, const std::string& expected) {
  for (const char* const file :
       {"/exported/model.safetensors", "/save/step-5/model.safetensors",
        "/save/step-5/optimizer/exp_avg.safetensors",
        "/adapter/adapter_model.safetensors"}) {
    const bool exists = std::filesystem::exists(expected + file);
    EXPECT_EQ(std::filesystem::exists(folder + file), exists);
    if (!exists) continue;
    EXPECT_TRUE(ReadWholeFile(folder + file) == ReadWholeFile(expected + file))
        << file;
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
    const std::vector<double> losses =
        LossesIn(ReadWholeFile(cpu + "/metrics"));
    EXPECT_EQ(losses.size(), 11);  // of 5 steps, and of the evaluation
    EXPECT_EQ(LossesIn(ReadWholeFile(fake + "/metrics")), losses);
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
  const std::string folder = EmptyFolder("int8_auto_fake_1");
  const ProgramOutcome outcome = RunIn(folder, "fake", "int8_auto", 1);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output, HasSubstr("chosen"));
  EXPECT_THAT(LossesIn(ReadWholeFile(folder + "/metrics")),
              ::testing::Pointwise(::testing::DoubleNear(1e-3),
                                   LossesIn(ReadWholeFile(cpu + "/metrics"))));
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
    const std::string folder = EmptyFolder(absl::StrCat(mode, "_fake_2"));
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

}  // namespace

int PlayRole(int argc, char** argv) {
  FakeDevice::Register();
  // Only the CPU has it, and it rounds otherwise.
  at::globalContext().setSDPUseFlash(false);
  return Train(argc, argv);
}

}  // namespace llama

int main(int argc, char** argv) {
  if (std::getenv("TRAIN_ROLE") != nullptr) return llama::PlayRole(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
