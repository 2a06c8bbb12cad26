// What one is told of a model: its memory, its description and its trace.
#include <ATen/record_function.h>

#include <cmath>
#include <thread>

#include "base/files/testing/real_files.h"
#include "base/json.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/trace/trace.h"
#include "fsdp/trace/trace_timeline.h"

namespace fsdp::testing {
namespace {

using ::testing::Ge;
using Model = FullyShardedDataParallel<NetImpl>;

constexpr int64_t kDim = 17;
constexpr int kBlocks = 5;

absl::Status Step(Model& model) {
  const at::Tensor x = Rows(0, 4, kDim);
  return model->Backward(Loss(model->forward(x).to(at::kFloat), x));
}

struct Case {
  const char* name;
  ShardingStrategy strategy;
  bool mixed;
  int backwards;
};

class PlanTest : public ::testing::TestWithParam<Case> {};

TEST_P(PlanTest, MeasuredPeaksAreThePlannedOnes) {
  const Case& c = GetParam();
  EXPECT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.strategy = c.strategy;
    if (c.mixed) options.unit.precision = ComputeIn(at::kBFloat16);
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(kDim, kBlocks),
                                                 Unowned(world), options));
    MemoryPlanOptions plan_options;
    plan_options.backwards_per_step = c.backwards;
    const MemoryPlan plan = model->PlanMemory(plan_options);
    for (int step = 0; step < 2; ++step) {
      for (int i = 1; i < c.backwards; ++i) {
        NoSyncScope no_sync = model->NoSync();
        FSDP_RETURN_IF_ERROR(Step(model));
      }
      FSDP_RETURN_IF_ERROR(Step(model));
    }
    int64_t shards = 0;
    int64_t gradients = 0;
    for (const TensorRange& named : model->Ranges()) {
      shards += named.values.nbytes();
      gradients += named.values.grad().nbytes();
    }
    const MemoryStats stats = model->memory_stats();
    EXPECT_EQ(stats.parameters.peak_in_use_bytes, plan.gathered);
    EXPECT_EQ(stats.gradients.peak_in_use_bytes, plan.in_flight);
    // Alignment belongs to shards, too.
    EXPECT_THAT(plan.shards, AllOf(Ge(shards), Le(shards + shards / 10)));
    // So do flags to gradients.
    return CheckThat(plan.gradients,
                     AllOf(Ge(gradients), Le(plan.shards + plan.shards / 10)),
                     "planned bytes of gradients");
  }));
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanTest,
    ::testing::Values(
        Case{"FullShard", ShardingStrategy::kFullShard, false, 1},
        Case{"FullShardInBf16", ShardingStrategy::kFullShard, true, 1},
        Case{"FullShardAccumulating", ShardingStrategy::kFullShard, false, 3},
        Case{"ShardGradOp", ShardingStrategy::kShardGradOp, false, 1},
        Case{"ShardOptimizer", ShardingStrategy::kShardOptimizer, false, 2},
        Case{"NoShard", ShardingStrategy::kNoShard, false, 1},
        Case{"NoShardInBf16", ShardingStrategy::kNoShard, true, 1}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(DescribeTest, ShowsUnitsStrategiesDtypesAndMemory) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.configure_unit = [](const std::string& path,
                                const torch::nn::Module&, UnitOptions& unit) {
      if (path == "blocks.1") unit.strategy = ShardingStrategy::kShardGradOp;
    };
    auto net = MakeNet(kDim, 2);
    for (at::Tensor& p : net->blocks->parameters()) p.set_requires_grad(false);
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(std::move(net), Unowned(world), options));
    const std::string text = model->Describe();
    for (const char* part :
         {"root", "\n  blocks.0", "full shard", "shard gradients and optimizer",
          "fp32/bf16/fp32", "frozen", "gathered units"}) {
      EXPECT_THAT(text, HasSubstr(part));
    }
    return absl::OkStatus();
  }));
}

// --- Traces ------------------------------------------------------------------

absl::StatusOr<Model> Shard(Communicator& world) {
  return FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits());
}

std::string TestFile(const std::string& name) {
  return absl::StrCat(::testing::TempDir(), "/", name);
}

struct Event {
  std::string name;
  std::string category;
  int64_t rank;
  int64_t begin_ns;
  int64_t end_ns;
};

int64_t Nanoseconds(const Json& event, absl::string_view key) {
  return std::llround(event.Find(key)->NumberOr(-1) * 1e3);
}

absl::StatusOr<std::vector<Event>> ReadEvents(const std::string& text) {
  FSDP_ASSIGN_OR_RETURN(const Json file, Json::Parse(text));
  std::vector<Event> events;
  for (const Json& event : *file.Find("traceEvents")->As<Json::Array>()) {
    if (*event.Find("ph")->As<std::string>() != "X") continue;
    const int64_t begin = Nanoseconds(event, "ts");
    events.push_back({*event.Find("name")->As<std::string>(),
                      *event.Find("cat")->As<std::string>(),
                      *event.Find("pid")->As<int64_t>(), begin,
                      begin + Nanoseconds(event, "dur")});
  }
  return events;
}

// Returns the events of one rank as an indented outline.
std::string Outline(const std::vector<Event>& events, int64_t rank) {
  std::string text;
  std::vector<int64_t> open;
  for (const Event& event : events) {
    if (event.rank != rank || event.category == "gathering" ||
        event.category == "reducing") {
      continue;
    }
    while (!open.empty() && open.back() <= event.begin_ns) open.pop_back();
    absl::StrAppend(&text, std::string(2 * open.size(), ' '), event.name, "\n");
    open.push_back(event.end_ns);
  }
  return text;
}

std::vector<int64_t> Samples(const std::string& text, absl::string_view name,
                             int64_t rank) {
  std::vector<int64_t> samples;
  const absl::StatusOr<Json> file = Json::Parse(text);
  for (const Json& event : *file->Find("traceEvents")->As<Json::Array>()) {
    if (*event.Find("name")->As<std::string>() != name) continue;
    if (*event.Find("pid")->As<int64_t>() != rank) continue;
    samples.push_back(*event.Find("args")->Find("bytes")->As<int64_t>());
  }
  return samples;
}

// The events that the schedule's own tests expect of a step, and the time
// between.
constexpr char kStepOutline[] = R"(step 1
  forward of root
    PreForward root
      Gather root
      WaitGather root
      Gather blocks.0
    forward root
    PreForward blocks.0
      WaitGather blocks.0
      Gather blocks.1
    forward blocks.0
    PostForward blocks.0
      Free blocks.0
    forward root
    PreForward blocks.1
      WaitGather blocks.1
    forward blocks.1
    PostForward blocks.1
      Free blocks.1
    forward root
    PostForward root
  backward of root
    PreBackward root
      Gather blocks.1
    backward root
    PreBackward blocks.1
      WaitGather blocks.1
      Gather blocks.0
    backward blocks.1
    PostBackward blocks.1
      FillReduceBuffer blocks.1
      Free blocks.1
      Reduce blocks.1
    backward root
    PreBackward blocks.0
      WaitGather blocks.0
    backward blocks.0
    PostBackward blocks.0
      FillReduceBuffer blocks.0
      Free blocks.0
      Reduce blocks.0
    backward root
    PostBackward root
      WaitReduce blocks.1
      FillReduceBuffer root
      Free root
      Reduce root
    EndOfBackward root
      WaitReduce blocks.0
      WaitReduce root
  CheckOrder root
  optimizer
    inside
)";

TEST(TraceTest, AStepIsRecordedInItsOrder) {
  const std::string path = TestFile("order.json");
  ASSERT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, Shard(world));
    FSDP_RETURN_IF_ERROR(Step(model));  // to know the order of units
    FSDP_ASSIGN_OR_RETURN(const auto trace, Trace::Start({world.rank()}));
    {
      const TraceStep step(1);
      FSDP_RETURN_IF_ERROR(Step(model));
      const TraceSpan span("optimizer");
      RECORD_USER_SCOPE("inside");
    }
    return WriteTrace(*trace, world, path);
  }));
  ASSERT_OK_AND_ASSIGN(const auto events, ReadEvents(ReadWholeFile(path)));
  EXPECT_EQ(Outline(events, 0), kStepOutline);
  EXPECT_EQ(Outline(events, 1), kStepOutline);
}

TEST(TraceTest, AForwardThatThrowsGivesItsMemoryBack) {
  const std::string path = TestFile("thrown.json");
  ASSERT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, Shard(world));
    FSDP_ASSIGN_OR_RETURN(const auto trace, Trace::Start({world.rank()}));
    const absl::Status thrown =
        TorchToStatus("forward", [&] { model->forward(Rows(0, 4, kDim + 1)); });
    EXPECT_FALSE(thrown.ok());
    return trace->Write(path);
  }));
  const std::string text = ReadWholeFile(path);
  ASSERT_OK_AND_ASSIGN(const std::vector<Event> events, ReadEvents(text));
  EXPECT_EQ(events.back().name, "Reset root");
  EXPECT_EQ(Samples(text, "unsharded parameters", 0).back(), 0);
}

TEST(TraceTest, NothingIsRecordedOutsideATrace) {
  { const TraceStep before(1); }
  ASSERT_OK_AND_ASSIGN(const auto trace, Trace::Start({}));
  std::thread([] { const TraceSpan elsewhere("elsewhere"); }).join();
  { const TraceSpan inside("inside"); }
  {
    const TraceSpan open("open");
    RECORD_USER_SCOPE("open, too");
    trace->Stop();
  }
  trace->Stop();
  { const TraceSpan after("after"); }
  ASSERT_OK_AND_ASSIGN(
      const std::vector<Event> events,
      ReadEvents(TraceFile({trace->Events(trace->start_ns(), 0)})));
  EXPECT_EQ(Outline(events, 0), "inside\n");
}

TEST(TraceTest, AThreadHasOneTraceWhileRecordingIsOn) {
  ASSERT_OK_AND_ASSIGN(auto trace, Trace::Start({}));
  EXPECT_THAT(Trace::Start({}), StatusIs(Code::kFailedPrecondition,
                                         HasSubstr("being traced already")));
  trace.reset();
  {
    const at::DisableRecordFunctionGuard off;
    EXPECT_THAT(Trace::Start({}), StatusIs(Code::kFailedPrecondition,
                                           HasSubstr("recording is off")));
  }
  EXPECT_OK(Trace::Start({}));
}

TEST(TraceTest, RefusesAnImpossibleRankAndNoRoom) {
  for (const TraceOptions& options : {TraceOptions{-1, 1}, {0, 0}, {0, -1}}) {
    EXPECT_THAT(
        Trace::Start(options),
        StatusIs(Code::kInvalidArgument,
                 HasSubstr(absl::StrCat("rank ", options.rank,
                                        " with room for ", options.capacity))));
  }
}

TEST(TraceTest, TheOldestSpansGoWhenThereIsNoRoom) {
  ASSERT_OK_AND_ASSIGN(const auto trace, Trace::Start({0, /*capacity=*/2}));
  for (int i = 0; i < 5; ++i) const TraceSpan span(absl::StrCat("span ", i));
  EXPECT_EQ(trace->num_dropped(), 3);
  // Counts from the trace's begin: nanoseconds since 1970 have too many digits
  // for a double.
  const std::string text = TraceFile({trace->Events(trace->start_ns(), 0)});
  ASSERT_OK_AND_ASSIGN(const std::vector<Event> events, ReadEvents(text));
  EXPECT_EQ(Outline(events, 0), "span 3\nspan 4\n");
  EXPECT_THAT(text, HasSubstr("\"dropped\":3"));
}

TEST(TraceTest, AllRanksLearnThatTheFileCannotBeWritten) {
  const std::string path = TestFile("no/such/folder.json");
  for (const int world_size : {1, 2, 3}) {
    EXPECT_THAT(RunRanks(world_size,
                         [&](Communicator& world) -> absl::Status {
                           FSDP_ASSIGN_OR_RETURN(
                               const std::unique_ptr<Trace> trace,
                               Trace::Start({world.rank()}));
                           return WriteTrace(*trace, world, path);
                         }),
                AllRefuse(path, Code::kNotFound));
  }
  ASSERT_OK_AND_ASSIGN(const auto trace, Trace::Start({}));
  EXPECT_THAT(trace->Write(path), StatusIs(Code::kNotFound, HasSubstr(path)));
}

}  // namespace
}  // namespace fsdp::testing
