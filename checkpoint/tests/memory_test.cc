// How much memory a save and a load take beyond the model: their buffers. Of a
// program of its own, this one started again.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::EmptyFolder;

constexpr char kRole[] = "CHECKPOINT_MEMORY_TEST_FOLDER";
constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kModelBytes = 200 * kMiB;
constexpr int64_t kStagingBytes = 32 * kMiB;
// RangeWriter's and RangeReader's, and what else a program comes to need.
constexpr int64_t kBufferBytes = 16 * kMiB;
constexpr int64_t kSlackBytes = 12 * kMiB;
// Of states that take the place of others: at a time.
constexpr int64_t kStateBatchBytes = 64 * kMiB;

struct Large : torch::nn::Module {
  explicit Large(int64_t bytes) {
    constexpr int64_t kTensors = 10;
    for (int64_t i = 0; i < kTensors; ++i) {
      register_parameter(
          absl::StrCat("weight", i),
          at::full({bytes / kTensors / 4}, static_cast<double>(i)));
    }
  }
};

// AdamW's states of a model, of `dtype`, as after a step.
void SetStates(torch::nn::Module& model, c10::ScalarType dtype,
               torch::optim::AdamW& optimizer) {
  for (const at::Tensor& parameter : model.parameters()) {
    auto state = std::make_unique<torch::optim::AdamWParamState>();
    state->step(1);
    state->exp_avg(at::full(parameter.sizes(), 1.0, dtype));
    state->exp_avg_sq(at::full(parameter.sizes(), 2.0, dtype));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
}

// Of /proc/self/status, in bytes: "VmHWM:   1234 kB".
int64_t StatusBytes(absl::string_view name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    absl::string_view rest = line;
    if (!absl::ConsumePrefix(&rest, name)) continue;
    absl::ConsumeSuffix(&rest, " kB");
    int64_t kib = 0;
    FSDP_CHECK(absl::SimpleAtoi(rest, &kib));
    return kib * 1024;
  }
  return 0;
}

// What `call` takes at most beyond what there is before; it is printed.
template <typename Call>
absl::Status Measure(absl::string_view name, const Call& call) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const int64_t before = StatusBytes("VmRSS:");
  FSDP_RETURN_IF_ERROR(call());
  std::cout << absl::StrCat("\n", name, " ", StatusBytes("VmHWM:") - before,
                            "\n")
            << std::flush;
  return absl::OkStatus();
}

absl::Status RunWithOptimizer(const std::string& folder) {
  const auto model = std::make_shared<Large>(kModelBytes / 2);
  torch::optim::AdamW optimizer(model->parameters());
  TrainingRun run;
  run.model = model.get();
  run.optimizer = &optimizer;
  FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                        Checkpointer::Open(folder, nullptr));
  SetStates(*model, c10::kFloat, optimizer);
  FSDP_RETURN_IF_ERROR(checkpoints->Save(1, run));
  FSDP_RETURN_IF_ERROR(
      Measure("states", [&] { return checkpoints->Load(1, run); }));
  SetStates(*model, c10::kDouble, optimizer);
  return Measure("states of another dtype",
                 [&] { return checkpoints->Load(1, run); });
}

absl::Status RunProgram(const std::string& folder) {
  FSDP_RETURN_IF_ERROR(RunWithOptimizer(folder + "/optimizer"));
  const auto model = std::make_shared<Large>(kModelBytes);
  TrainingRun run;
  run.model = model.get();
  CheckpointerOptions options;
  options.staging_bytes = kStagingBytes;
  FSDP_ASSIGN_OR_RETURN(
      const auto checkpoints,
      Checkpointer::Open(folder + "/model", nullptr, options));
  FSDP_RETURN_IF_ERROR(
      Measure("save", [&] { return checkpoints->Save(1, run); }));
  // Once before: what of LibTorch is used for the first time is no buffer.
  FSDP_RETURN_IF_ERROR(checkpoints->Load(1, run));
  FSDP_RETURN_IF_ERROR(
      Measure("load", [&] { return checkpoints->Load(1, run); }));
  return Measure("async", [&]() -> absl::Status {
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(2, run));
    return checkpoints->Wait();
  });
}

// By the name of what was measured.
int64_t BytesOf(absl::string_view name, const std::string& output) {
  for (absl::string_view line : absl::StrSplit(output, '\n')) {
    int64_t bytes = 0;
    if (absl::ConsumePrefix(&line, absl::StrCat(name, " ")) &&
        absl::SimpleAtoi(line, &bytes)) {
      return bytes;
    }
  }
  ADD_FAILURE() << output;
  return 0;
}

TEST(MemoryTest, BuffersOnly) {
  const auto [code, output] = fsdp::testing::RunThisProgram(
      absl::StrCat(kRole, "='", EmptyFolder("memory"), "'"));
  EXPECT_EQ(code, 0) << output;
  std::cout << output;
  EXPECT_LT(BytesOf("save", output), kBufferBytes + kSlackBytes);
  EXPECT_LT(BytesOf("async", output),
            kStagingBytes + kBufferBytes + kSlackBytes);
  EXPECT_LT(BytesOf("load", output), kBufferBytes + kSlackBytes);
  EXPECT_LT(BytesOf("states", output), kBufferBytes + kSlackBytes);
  EXPECT_LT(BytesOf("states of another dtype", output),
            kStateBatchBytes + kBufferBytes + kSlackBytes);
}

}  // namespace
}  // namespace fsdp::checkpoint::testing

int main(int argc, char** argv) {
  using fsdp::checkpoint::testing::kRole;
  if (const char* const folder = std::getenv(kRole)) {
    const absl::Status status = fsdp::checkpoint::testing::RunProgram(folder);
    if (!status.ok()) std::cout << status << std::endl;
    return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
