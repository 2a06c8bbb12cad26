// What a sharded model notes for those who ask why a rank hangs, and the
// answers of a rank that is stuck in a store or in the optimizer's step.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adamw.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/rank_activity.h"
#include "comm/startup/environment.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/sharded_test.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"
#include "ranges/tensor_range.h"

namespace fsdp::testing {
namespace {

using ::testing::Not;

using Model = FullyShardedDataParallel<NetImpl>;

constexpr int64_t kDim = 5;
constexpr absl::Duration kLimit = absl::Seconds(60);

// A place at which a rank stops, once, until the test lets it go on.
class Stop {
 public:
  void Arm() { armed_ = true; }
  // Stops at this place; `where` names it.
  void Pass(absl::string_view where) {
    if (!armed_.exchange(false)) return;
    where_ = std::string(where);
    stopped_.Notify();
    go_on_.WaitForNotificationWithTimeout(kLimit);
  }
  bool AwaitStopped() {
    return stopped_.WaitForNotificationWithTimeout(kLimit);
  }
  void GoOn() { go_on_.Notify(); }
  // Must be called after it has stopped.
  const std::string& where() const { return where_; }

 private:
  std::atomic<bool> armed_{false};
  std::string where_;
  absl::Notification stopped_;
  absl::Notification go_on_;
};

class StoppedTransfer final : public offload::Transfer {
 public:
  StoppedTransfer(std::unique_ptr<offload::Transfer> base, std::string region,
                  Stop* stop)
      : base_(std::move(base)), region_(std::move(region)), stop_(stop) {}

  absl::Status Wait(absl::Time deadline) override {
    if (deadline > absl::Now()) stop_->Pass(region_);
    return base_->Wait(deadline);
  }

 private:
  const std::unique_ptr<offload::Transfer> base_;
  const std::string region_;
  Stop* const stop_;
};

// A store that stops those who wait for a read or a flush.
class StoppingStore final : public offload::testing::ForwardingStore {
 public:
  StoppingStore(std::unique_ptr<offload::ParamStore> base, Stop* reads,
                Stop* flushes)
      : ForwardingStore(std::move(base)), reads_(reads), flushes_(flushes) {}

  absl::StatusOr<std::unique_ptr<offload::Transfer>> Read(
      absl::string_view region, int64_t offset, absl::Span<char> out) override {
    FSDP_ASSIGN_OR_RETURN(auto read,
                          ForwardingStore::Read(region, offset, out));
    return std::make_unique<StoppedTransfer>(std::move(read),
                                             std::string(region), reads_);
  }
  absl::StatusOr<std::unique_ptr<offload::Transfer>> Flush() override {
    FSDP_ASSIGN_OR_RETURN(auto flush, ForwardingStore::Flush());
    return std::make_unique<StoppedTransfer>(std::move(flush), "", flushes_);
  }

 private:
  Stop* const reads_;
  Stop* const flushes_;
};

std::unique_ptr<offload::ParamStore> HostStore(int64_t capacity) {
  return offload::testing::RollingHostStore(capacity).value();
}

class StoreWaitsTest : public ::testing::Test {
 protected:
  StoreWaitsTest()
      : ranks_(comm::Connect(comm::Environment(), comm::ConnectOptions())
                   .value()) {}

  // Runs `run` in a thread and returns the rank's answer while it has stopped.
  // Afterwards it must wait for nothing.
  std::string AnswerAt(Stop& stop, const std::function<void()>& run) {
    absl::Status status;
    std::thread rank([&] { status = TorchToStatus("a rank", run); });
    const bool has_stopped = stop.AwaitStopped();
    std::string answer = ranks_->activity()->Describe();
    stop.GoOn();
    rank.join();
    EXPECT_TRUE(has_stopped);
    EXPECT_OK(status);
    EXPECT_THAT(ranks_->activity()->Describe(),
                AllOf(Not(HasSubstr("waits for")),
                      HasSubstr("; outside forward and backward since")));
    return answer;
  }

  // Returns options by which `kind` rests in a store that may stop, and
  // everything else in others.
  Options Offloading(RestingKind kind) {
    Options options = BlockUnits();
    OffloadOptions& offload = options.offload;
    offload.parameters = offload.gradients = offload.optimizer = Tier::kSsd;
    // With so few bytes, every use is a transfer.
    offload.buffer_bytes = 10 * offload::kPageBytes;
    offload.make_store = [this, kind](RestingKind of, int64_t capacity)
        -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
      if (of != kind) return HostStore(capacity);
      return std::make_unique<StoppingStore>(HostStore(capacity), &reads_,
                                             &flushes_);
    };
    return options;
  }

  Model Shard(const Options& options) {
    return FullyShard(MakeNet(kDim, /*num_blocks=*/2), ranks_, options).value();
  }

  // Must run in the rank's thread, to which a model belongs.
  static void Backward(Model& model) {
    const at::Tensor x = Rows(0, 3, kDim);
    ThrowIfError(model->Backward(Loss(model->forward(x), x)));
  }

  // Returns the answer while the second step, or the forward before it, waits
  // at `stop` for the store of `kind`.
  std::string AnswerInTraining(RestingKind kind, Stop& stop, bool in_step) {
    Model model = Shard(Offloading(kind));
    return AnswerAt(stop, [&] {
      FusedOptions fused;
      fused.activity = ranks_->activity();
      FusedAdamW optimizer(model->Parameters(), torch::optim::AdamWOptions(),
                           fused);
      Backward(model);
      optimizer.step();
      optimizer.zero_grad();
      if (!in_step) stop.Arm();
      Backward(model);
      if (in_step) stop.Arm();
      optimizer.step();
    });
  }

  const std::shared_ptr<Communicator> ranks_;
  Stop reads_;
  Stop flushes_;
};

// Returns "blocks.1" for the region "blocks.1 #2, exp_avg".
std::string UnitOf(const std::string& region) {
  return region.substr(0, region.find(" #"));
}

TEST_F(StoreWaitsTest, ForwardThatWaitsForParameters) {
  const std::string answer =
      AnswerInTraining(RestingKind::kParameters, reads_, /*in_step=*/false);
  EXPECT_THAT(UnitOf(reads_.where()), Not(IsEmpty()));
  EXPECT_THAT(
      answer,
      AllOf(HasSubstr(absl::StrCat("waits for unit ", UnitOf(reads_.where()),
                                   " (parameters) to be read from its "
                                   "store for ")),
            HasSubstr("; forward of ")));
}

TEST_F(StoreWaitsTest, StepThatWaitsForStates) {
  const std::string answer =
      AnswerInTraining(RestingKind::kOptimizer, reads_, /*in_step=*/true);
  EXPECT_THAT(
      answer,
      AllOf(HasSubstr(absl::StrCat("waits for unit ", UnitOf(reads_.where()),
                                   " (optimizer) to be read from its "
                                   "store for ")),
            HasSubstr("; the optimizer's step since ")));
}

TEST_F(StoreWaitsTest, StepThatWaitsForWrites) {
  const std::string answer =
      AnswerInTraining(RestingKind::kParameters, flushes_, /*in_step=*/true);
  EXPECT_THAT(answer, AllOf(HasSubstr("waits for the model (parameters) to be "
                                      "written to its store for "),
                            HasSubstr("; the optimizer's step since ")));
}

TEST_F(StoreWaitsTest, ActivationsThatAreWaitedFor) {
  Model model = Shard(BlockUnits());
  const std::string answer = AnswerAt(reads_, [&] {
    Backward(model);
    ActivationOffloadOptions options;
    options.min_bytes = 1;
    options.activity = ranks_->activity();
    const auto offload = ValueOrThrow(ActivationOffload::Make(
        std::make_unique<StoppingStore>(HostStore(1 << 20), &reads_, &flushes_),
        options));
    at::Tensor tensor = at::ones({1000});
    const auto moved =
        offload->MoveOut({&tensor}, "a checkpointed region in unit blocks.1");
    ThrowIfError(moved == nullptr ? absl::InternalError("it has stayed")
                                  : absl::OkStatus());
    reads_.Arm();
    ThrowIfError(moved->MoveIn().status());
  });
  EXPECT_THAT(answer, HasSubstr(absl::StrCat("waits for ", reads_.where(),
                                             " to be read from its store")));
  EXPECT_THAT(reads_.where(),
              ::testing::EndsWith("of a checkpointed region in unit blocks.1"));
}

TEST_F(StoreWaitsTest, StepInBackward) {
  Model model = Shard(BlockUnits());
  Stop step;
  step.Arm();
  ASSERT_OK(model->StepInBackward([&](absl::Span<const TensorRange> shards) {
    if (shards.front().name.find("blocks.1.") == 0) step.Pass("blocks.1");
    return absl::OkStatus();
  }));
  EXPECT_THAT(AnswerAt(step, [&] { Backward(model); }),
              HasSubstr("; the optimizer's step of blocks.1 since "));
}

TEST_F(StoreWaitsTest, StepOfAScaler) {
  Model model = Shard(BlockUnits());
  auto scaler = ShardedGradScaler::Create(*ranks_, {});
  ASSERT_OK(scaler);
  Stop step;
  step.Arm();
  EXPECT_THAT(
      AnswerAt(step,
               [&] {
                 Backward(model);
                 ThrowIfError(
                     scaler->Step([&] { step.Pass("a step"); }, model->Ranges())
                         .status());
               }),
      HasSubstr("; the optimizer's step since "));
}

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
  EXPECT_EQ(notes->most_pool_bytes,
            memory.parameters.reserved_bytes + memory.gradients.reserved_bytes);
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
