// The notes of a sharded model for those who ask why a rank hangs.
#include <ATen/core/grad_mode.h>

#include "comm/rank_activity.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;

// The notes of one rank; a repeated phase appears once.
class Notes final : public comm::RankActivity {
 public:
  void Note(comm::Phase phase, absl::string_view unit,
            int64_t pool_bytes) override {
    std::string text(comm::PhaseName(phase));
    if (!unit.empty()) absl::StrAppend(&text, " of ", unit);
    if (texts.empty() || texts.back() != text) texts.push_back(text);
    most_pool_bytes = std::max(most_pool_bytes, pool_bytes);
  }
  uint64_t BeginWait(comm::StoreWait /*wait*/,
                     absl::string_view /*what*/) override {
    return 0;
  }
  void EndWait(uint64_t /*wait*/) override {}
  std::string Describe() const override { return ""; }

  std::vector<std::string> texts;
  int64_t most_pool_bytes = -1;
};

class NotedRanks final : public comm::ForwardingCommunicator {
 public:
  NotedRanks(Communicator& base, std::shared_ptr<Notes> notes)
      : ForwardingCommunicator(Unowned(base)), notes_(std::move(notes)) {}
  std::shared_ptr<comm::RankActivity> activity() const override {
    return notes_;
  }

 private:
  const std::shared_ptr<Notes> notes_;
};

// Records the notes of each rank in a step, and the pools' bytes.
absl::Status NoteSteps(Communicator& ranks,
                       std::vector<std::vector<std::string>>& results) {
  const auto notes = std::make_shared<Notes>();
  FSDP_ASSIGN_OR_RETURN(
      auto model,
      FullyShard(MakeNet(kDim, 2), std::make_shared<NotedRanks>(ranks, notes),
                 BlockUnits()));
  notes->texts.clear();
  const at::Tensor x = Rows(ranks.rank(), 3, kDim);
  const at::Tensor loss = Loss(model->forward(x), x);
  notes->texts.emplace_back("loss");
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  notes->texts.emplace_back("step");
  FusedOptions fused;
  fused.activity = notes;
  FSDP_RETURN_IF_ERROR(TorchToStatus("step", [&] {
    FusedAdamW(model->Parameters(), torch::optim::AdamWOptions(), fused).step();
  }));
  const MemoryStats memory = model->memory_stats();
  FSDP_RETURN_IF_ERROR(CheckThat(
      notes->most_pool_bytes,
      Eq(memory.parameters.reserved_bytes + memory.gradients.reserved_bytes),
      "most bytes of the pools"));
  {
    const at::NoGradGuard no_grad;
    model->forward(x);
  }
  results[ranks.rank()] = notes->texts;
  return absl::OkStatus();
}

TEST(ActivityTest, AStepIsNotedUnitByUnit) {
  std::vector<std::vector<std::string>> results(2);
  ASSERT_OK(RunAllRanks(
      2, [&](Communicator& ranks) { return NoteSteps(ranks, results); }));
  for (const std::vector<std::string>& texts : results) {
    EXPECT_THAT(
        texts,
        ElementsAre("forward of root", "forward of blocks.0",
                    "forward of blocks.1", "outside forward and backward",
                    "loss", "backward of root", "backward of blocks.1",
                    "backward of blocks.0", "backward of root", "backward",
                    "outside forward and backward", "step",
                    "the optimizer's step", "outside forward and backward",
                    "forward of root", "forward of blocks.0",
                    "forward of blocks.1", "outside forward and backward"));
  }
}

}  // namespace
}  // namespace fsdp::testing
