// Shows what recording every operation costs: `ns_per_operation` from its call
// to the end of its wait, beyond what the backend takes; `ns_per_note` of a
// phase; `ns_per_wait` for a store; and `percent_of_step`, from how many of
// each a training step has, also a step whose parameters, gradients and states
// rest in a store, here host memory.
//   ./bazelw run -c opt //benchmarks:flight_recorder_benchmark
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_error.h"
#include "benchmark/benchmark.h"
#include "benchmarks/rank_threads.h"
#include "benchmarks/sharded_mlp.h"
#include "comm/communicator.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/inspected_communicator.h"
#include "comm/inspection/inspector.h"
#include "comm/local/local_communicator.h"
#include "comm/rank_activity.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/options/options.h"
#include "offload/host_store.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

constexpr int kRanks = 2;
constexpr int kCalls = 20'000;

class DoneWork final : public comm::Work {
 public:
  absl::Status Wait(absl::Time /*deadline*/) override {
    return absl::OkStatus();
  }
  absl::Status BlockCurrentStream() override { return absl::OkStatus(); }
};

// All-reduces of these ranks take no time.
class DoneRanks final : public comm::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;

 protected:
  absl::StatusOr<std::unique_ptr<comm::Work>> DoAllReduce(
      const at::Tensor& /*tensor*/, comm::ReduceOp /*op*/,
      absl::string_view /*label*/) override {
    return std::make_unique<DoneWork>();
  }
};

std::shared_ptr<comm::Inspector> Alone() {
  return ValueOrThrow(comm::Inspector::Start({}, /*peers=*/nullptr));
}

std::unique_ptr<comm::Communicator> MakeDoneRanks() {
  auto group = ValueOrThrow(comm::CreateLocalGroup(1));
  return std::make_unique<DoneRanks>(std::move(group[0]));
}

double NsPerCall(const std::function<void()>& call) {
  const absl::Time begin = absl::Now();
  for (int i = 0; i < kCalls; ++i) call();
  return absl::ToDoubleNanoseconds(absl::Now() - begin) / kCalls;
}

double NsPerAllReduce(comm::Communicator& ranks, const at::Tensor& tensor) {
  return NsPerCall([&] {
    auto work = ValueOrThrow(
        ranks.AllReduce(tensor, comm::ReduceOp::kSum, "blocks.7.feed_forward"));
    ThrowIfError(work->Wait(absl::InfiniteFuture()));
  });
}

struct Costs {
  double ns_per_operation;
  double ns_per_note;
  double ns_per_wait;
};

// Measures right after the same without a recorder.
Costs Measure() {
  const at::Tensor tensor = at::ones({4});
  const auto plain = MakeDoneRanks();
  const auto inspected = comm::Inspect(MakeDoneRanks(), Alone());
  const auto activity = inspected->activity();
  const double without = NsPerAllReduce(*plain, tensor);
  return {NsPerAllReduce(*inspected, tensor) - without, NsPerCall([&] {
            activity->Note(comm::Phase::kForward, "blocks.7.feed_forward", 1);
          }),
          NsPerCall([&] {
            const comm::StoreWaitScope wait(activity.get(),
                                            comm::StoreWait::kRead,
                                            "unit blocks.7.feed_forward");
          })};
}

void BM_Operation(benchmark::State& state) {
  Costs sum = {0, 0, 0};
  for (auto _ : state) {
    const Costs costs = Measure();
    sum.ns_per_operation += costs.ns_per_operation;
    sum.ns_per_note += costs.ns_per_note;
    sum.ns_per_wait += costs.ns_per_wait;
  }
  const auto rounds = static_cast<double>(state.iterations());
  state.counters["ns_per_operation"] = sum.ns_per_operation / rounds;
  state.counters["ns_per_note"] = sum.ns_per_note / rounds;
  state.counters["ns_per_wait"] = sum.ns_per_wait / rounds;
}
BENCHMARK(BM_Operation)->Unit(benchmark::kMillisecond);

// Counts for all ranks.
struct Counts {
  std::atomic<int64_t> notes{0};
  std::atomic<int64_t> waits{0};
};

class CountedActivity final : public comm::RankActivity {
 public:
  explicit CountedActivity(Counts* counts) : counts_(counts) {}
  void Note(comm::Phase /*phase*/, absl::string_view /*unit*/,
            int64_t /*pool_bytes*/) override {
    ++counts_->notes;
  }
  uint64_t BeginWait(comm::StoreWait /*wait*/,
                     absl::string_view /*what*/) override {
    ++counts_->waits;
    return 0;
  }
  void EndWait(uint64_t /*wait*/) override {}
  std::string Describe() const override { return ""; }

 private:
  Counts* const counts_;
};

class CountedRanks final : public comm::ForwardingCommunicator {
 public:
  CountedRanks(std::unique_ptr<comm::Communicator> base, Counts* counts)
      : ForwardingCommunicator(std::move(base)),
        activity_(std::make_shared<CountedActivity>(counts)) {}
  std::shared_ptr<comm::RankActivity> activity() const override {
    return activity_;
  }

 private:
  const std::shared_ptr<comm::RankActivity> activity_;
};

Options Offloading() {
  Options options;
  OffloadOptions& offload = options.offload;
  offload.parameters = offload.gradients = offload.optimizer = Tier::kSsd;
  offload.make_store = [](RestingKind /*kind*/, int64_t capacity)
      -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
    return offload::HostStore::Make(capacity, offload::PageAllocator::System(),
                                    /*rollback=*/true);
  };
  return options;
}

// Reports what a rank records in a step, over the time of the step.
void BM_Step(benchmark::State& state) {
  Counts counts;
  std::vector<std::shared_ptr<comm::Inspector>> inspectors;
  inspectors.reserve(kRanks);
  std::vector<std::function<void()>> steps(kRanks);
  auto group = ValueOrThrow(comm::CreateLocalGroup(kRanks));
  for (int rank = 0; rank < kRanks; ++rank) inspectors.push_back(Alone());
  OnAllRanks(kRanks, [&](int rank) {
    steps[rank] = StepOf(
        ShardMlp(std::make_shared<CountedRanks>(
                     comm::Inspect(std::move(group[rank]), inspectors[rank]),
                     &counts),
                 state.range(1) == 0 ? Options() : Offloading()),
        state.range(0));
    steps[rank]();
  });
  const auto operations = [&] {
    return inspectors[0]->recorder().Read(0).num_operations;
  };
  const uint64_t operations_before = operations();
  counts.notes = 0;
  counts.waits = 0;
  double seconds = 0;
  for (auto _ : state) {
    const absl::Time begin = absl::Now();
    OnAllRanks(kRanks, [&](int rank) { steps[rank](); });
    seconds += absl::ToDoubleSeconds(absl::Now() - begin);
  }
  const auto rounds = static_cast<double>(state.iterations());
  const Costs costs = Measure();
  const double operations_per_step =
      static_cast<double>(operations() - operations_before) / rounds;
  const auto per_step = [&](int64_t all) {
    return static_cast<double>(all) / kRanks / rounds;
  };
  const double notes_per_step = per_step(counts.notes);
  const double waits_per_step = per_step(counts.waits);
  state.counters["operations"] = operations_per_step;
  state.counters["notes"] = notes_per_step;
  state.counters["waits"] = waits_per_step;
  state.counters["percent_of_step"] =
      (operations_per_step * costs.ns_per_operation +
       notes_per_step * costs.ns_per_note +
       waits_per_step * costs.ns_per_wait) *
      1e-9 / (seconds / rounds) * 100;
}
BENCHMARK(BM_Step)
    ->ArgNames({"rows", "offloads"})
    ->Args({64, 0})
    ->Args({512, 0})
    ->Args({64, 1})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fsdp
