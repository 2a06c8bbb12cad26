#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/parsed_flags.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/train_run.h"
#include "fsdp/options/offload_options.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<TrainFlags> Parse(const std::string& flags) {
  return fsdp::testing::ParsedBy(ReadTrainFlags,
                                 "train --model=m --data=d " + flags);
}

TEST(TrainFlagsTest, SaysWhatCannotBe) {
  EXPECT_OK(Parse(""));
  const std::pair<const char*, const char*> cases[] = {
      {"--model=", "--model=DIR"},
      {"--data=", "--data=FILE"},
      {"--ranks=0", "--ranks=0: expected 1 to"},
      {"--threads=-1", "--threads=-1: expected 0 to"},
      {"--threads=1025", "--threads=1025: expected 0 to 1024"},
      {"--ranks=1025", "--ranks=1025: expected 1 to 1024"},
      {"--seq=0", "--seq=0"},
      {"--batch=0", "--batch=0"},
      {"--micro_batches=0", "--micro_batches=0"},
      {"--steps=0", "--steps=0"},
      {"--warmup=-1", "--warmup=-1"},
      {"--lr=-1", "--lr=-1"},
      {"--lr_floor=2", "--lr_floor=2: expected 0 to 1"},
      {"--clip=-0.5", "--clip=-0.5"},
      {"--rows=lines", "--rows=lines: expected one of packed, stream"},
      {"--auto", "--auto_memory=GIB"},
      {"--auto_memory=1", "for --auto alone"},
      {"--auto_memory=-1", "--auto_memory=-1"},
      {"--auto --auto_memory=1 --recompute", "--auto with --recompute"},
      {"--auto --auto_memory=1 --offload=optimizer=cpu",
       "--auto with --offload"},
      {"--auto_host=1", "for --auto alone"},
      {"--auto --auto_memory=1 --auto_host=1",
       "--auto_host without --device=cuda"},
      {"--offload=gradients=ssd", "needs --offload_dir=DIR"},
      {"--offload_dir=d", "--offload_dir"},
      {"--offload_budget=1", "--offload_budget without --offload"},
      {"--capture", "--capture needs --device"},
      {"--device=cuda --capture --offload=optimizer=cpu",
       "--capture with --offload"},
      {"--device=cuda --capture --rows=packed", "--capture with --rows=packed"},
      {"--device=cuda --capture --skip_nonfinite=1",
       "--capture with --skip_nonfinite"},
      {"--eval_every=3", "--eval_data"},
      {"--resume", "need --save"},
      {"--resume=required", "need --save"},
      {"--skip_nonfinite=-1", "--skip_nonfinite=-1"},
      {"--save=s --max_restarts=1 --resume=required", "--resume"},
      {"--save_every=3", "need --save"},
      {"--save=s --max_restarts=1", "--resume"},
      {"--save_adapter=a", "--lora_rank"},
      {"--save=s --export=s", "of their own"},
      {"--save=s --export=s/model", "--export=s/model and --save=s"},
      {"--save=s/ --export=s/model", "take folders of their own"},
      {"--save=s/../t --export=t", "take folders of their own"},
      // Without a rank there are none, and everything would be trained.
      {"--lora_alpha=32", "--lora_targets need --lora_rank"},
      {"--lora_rank=1 --lora_targets=", "no layers"},
      {"--lora_rank=1 --adapter=a", "its own rank"},
      {"--base_block=0", "--base_block=0"},
      {"--base=int8", "--base=int8 needs --lora_rank"},
      {"--base=int8 --adapter=a --from_scratch", "--from_scratch"},
      {"--base=int8 --adapter=a --export=e", "need --save_adapter"}};
  for (const auto& [flags, text] : cases) {
    EXPECT_THAT(Parse(flags),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)))
        << flags;
  }
}

TEST(TrainFlagsTest, OffloadNamesTiersForAllKindsOrForEach) {
  using fsdp::Tier;
  const std::pair<const char*, std::vector<Tier>> cases[] = {
      {"none", {Tier::kDevice, Tier::kDevice, Tier::kDevice}},
      {"cpu", {Tier::kCpu, Tier::kCpu, Tier::kCpu}},
      {"optimizer=cpu", {Tier::kDevice, Tier::kDevice, Tier::kCpu}},
      {"ssd,gradients=none", {Tier::kSsd, Tier::kDevice, Tier::kSsd}}};
  for (const auto& [text, tiers] : cases) {
    const bool on_ssd = tiers[0] == Tier::kSsd;
    ASSERT_OK_AND_ASSIGN(const TrainFlags flags,
                         Parse(absl::StrCat("--offload=", text, " ",
                                            on_ssd ? "--offload_dir=d" : "")));
    const fsdp::OffloadOptions& offload = flags.made.offload;
    EXPECT_THAT(tiers, ElementsAre(offload.parameters, offload.gradients,
                                   offload.optimizer))
        << text;
  }
  for (const char* const text :
       {"", "disk", "states=cpu", "optimizer", "ssd,none", "gradients=cpu,ssd",
        "parameters=ssd,parameters=ssd"}) {
    EXPECT_THAT(Parse(absl::StrCat("--offload=", text)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("expected none, cpu or ssd")));
  }
}

}  // namespace
}  // namespace llama
