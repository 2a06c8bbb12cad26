#include "examples/llama/flags/train_flags.h"

#include <c10/core/DeviceType.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "adapters/lora.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/flags/command_line.h"
#include "fsdp/options/offload_options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TrainFlags Sound() {
  TrainFlags flags;
  flags.model = "m";
  flags.data = "d";
  return flags;
}

using Change = std::function<void(TrainFlags&)>;

Change Captured(const Change& change) {
  return [change](TrainFlags& flags) {
    flags.device = c10::DeviceType::CUDA;
    flags.capture = true;
    change(flags);
  };
}

TEST(TrainFlagsTest, TheDefaultsAreSound) { EXPECT_OK(Check(Sound())); }

TEST(TrainFlagsTest, SaysWhatCannotBe) {
  const std::pair<Change, std::string> cases[] = {
      {[](TrainFlags& f) { f.model = ""; }, "--model=DIR"},
      {[](TrainFlags& f) { f.data = ""; }, "--data=FILE"},
      {[](TrainFlags& f) { f.ranks = 0; }, "--ranks=0"},
      {[](TrainFlags& f) { f.threads = -1; }, "--threads=-1"},
      {[](TrainFlags& f) { f.seq = 0; }, "--seq=0"},
      {[](TrainFlags& f) { f.batch = 0; }, "--batch=0"},
      {[](TrainFlags& f) { f.micro_batches = 0; }, "--micro_batches=0"},
      {[](TrainFlags& f) { f.steps = 0; }, "--steps=0"},
      {[](TrainFlags& f) { f.warmup = -1; }, "--warmup=-1"},
      {[](TrainFlags& f) { f.lr = -1; }, "--lr=-1"},
      {[](TrainFlags& f) { f.lr_floor = 2; }, "--lr_floor=2"},
      {[](TrainFlags& f) { f.clip = -0.5; }, "--clip=-0.5"},
      {[](TrainFlags& f) { f.automatic = true; }, "--auto_memory=GIB"},
      {[](TrainFlags& f) { f.auto_memory_gib = 1; }, "for --auto alone"},
      {[](TrainFlags& f) { f.auto_memory_gib = -1; }, "--auto_memory=-1"},
      {[](TrainFlags& f) {
         f.automatic = f.recompute = true;
         f.auto_memory_gib = 1;
       },
       "--auto with --recompute"},
      {[](TrainFlags& f) {
         f.automatic = true;
         f.auto_memory_gib = 1;
         f.offload.optimizer = fsdp::Tier::kCpu;
       },
       "--auto with --offload"},
      {[](TrainFlags& f) { f.auto_host_gib = 1; }, "for --auto alone"},
      {[](TrainFlags& f) {
         f.automatic = true;
         f.auto_memory_gib = f.auto_host_gib = 1;
       },
       "--auto_host without --device=cuda"},
      {[](TrainFlags& f) { f.offload.gradients = fsdp::Tier::kSsd; },
       "needs --offload_dir=DIR"},
      {[](TrainFlags& f) { f.offload.directory = "d"; }, "--offload_dir"},
      {[](TrainFlags& f) { f.offload.memory_budget = 1; },
       "--offload_budget without --offload"},
      {[](TrainFlags& f) { f.capture = true; }, "--capture needs --device"},
      {Captured([](TrainFlags& f) { f.offload.optimizer = fsdp::Tier::kCpu; }),
       "--capture with --offload"},
      {Captured([](TrainFlags& f) { f.rows = Rows::kPacked; }),
       "--capture with --rows=packed"},
      {Captured([](TrainFlags& f) { f.skip_nonfinite = 1; }),
       "--capture with --skip_nonfinite"},
      {[](TrainFlags& f) { f.eval_every = 3; }, "--eval_data"},
      {[](TrainFlags& f) { f.resume = Resume::kIfThere; }, "need --save"},
      {[](TrainFlags& f) { f.resume = Resume::kRequired; }, "need --save"},
      {[](TrainFlags& f) { f.skip_nonfinite = -1; }, "--skip_nonfinite=-1"},
      {[](TrainFlags& f) {
         f.save = "s", f.max_restarts = 1;
         f.resume = Resume::kRequired;
       },
       "--resume"},
      {[](TrainFlags& f) { f.save_every = 3; }, "need --save"},
      {[](TrainFlags& f) { f.save = "s", f.max_restarts = 1; }, "--resume"},
      {[](TrainFlags& f) { f.save_adapter = "a"; }, "--lora_rank"},
      {[](TrainFlags& f) { f.save = f.export_dir = "s"; }, "of their own"},
      {[](TrainFlags& f) {
         f.save = "s";
         f.export_dir = "s/model";
       },
       "--export=s/model and --save=s"},
      {[](TrainFlags& f) { f.lora.emplace().targets = {}; }, "no layers"},
      {[](TrainFlags& f) {
         f.lora.emplace().targets = {"q_proj"};
         f.adapter = "a";
       },
       "its own rank"},
      {[](TrainFlags& f) { f.base_block = 0; }, "--base_block=0"},
      {[](TrainFlags& f) { f.base = Base::kInt8; },
       "--base=int8 needs --lora_rank"},
      {[](TrainFlags& f) {
         f.base = Base::kInt8;
         f.adapter = "a";
         f.from_scratch = true;
       },
       "--from_scratch"},
      {[](TrainFlags& f) {
         f.base = Base::kInt8;
         f.adapter = "a";
         f.export_dir = "e";
       },
       "need --save_adapter"}};
  for (const auto& [change, text] : cases) {
    TrainFlags flags = Sound();
    change(flags);
    EXPECT_THAT(Check(flags),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  }
}

// Without a rank there are none, and everything would be trained.
TEST(TrainFlagsTest, AdaptersNeedARank) {
  char words[][20] = {"train", "--model=m", "--data=d", "--lora_alpha=32"};
  char* arguments[] = {words[0], words[1], words[2], words[3]};
  EXPECT_THAT(ReadTrainFlags(4, arguments).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("--lora_targets need --lora_rank")));
}

TEST(TrainFlagsTest, OffloadNamesTiersForAllKindsOrForEach) {
  using fsdp::Tier;
  const std::pair<const char*, std::vector<Tier>> cases[] = {
      {"none", {Tier::kDevice, Tier::kDevice, Tier::kDevice}},
      {"cpu", {Tier::kCpu, Tier::kCpu, Tier::kCpu}},
      {"optimizer=cpu", {Tier::kDevice, Tier::kDevice, Tier::kCpu}},
      {"ssd,gradients=none", {Tier::kSsd, Tier::kDevice, Tier::kSsd}}};
  for (const auto& [text, tiers] : cases) {
    ASSERT_OK_AND_ASSIGN(const fsdp::OffloadOptions offload,
                         ParseOffload(text));
    EXPECT_THAT(tiers, ElementsAre(offload.parameters, offload.gradients,
                                   offload.optimizer))
        << text;
  }
  for (const char* const text :
       {"", "disk", "states=cpu", "optimizer", "ssd,none", "gradients=cpu,ssd",
        "parameters=ssd,parameters=ssd"}) {
    EXPECT_THAT(ParseOffload(text),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("expected none, cpu or ssd")));
  }
}

}  // namespace
}  // namespace llama
