// Runs collectives between ranks that are threads of this process: of a local
// group, in shared memory as processes have it, and over Gloo's TCP. Counters:
// `GB/s` of the whole tensor; `of_memcpy`, the time of one thread's memcpy of
// the whole tensor, measured right before, over the time of the collective;
// `of_bandwidth`, the same for the bytes that all ranks have to read and write,
// at the speed at which as many threads copy side by side.
//
// `in_place` shows what gathering costs where all ranks compute with the same
// memory: they agree that it is written and read it for the first time. `cast`
// is the same after each rank has cast its part from float32 to bfloat16.
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/connect_ranks.h"

namespace fsdp::comm {
namespace {

using Group = std::vector<std::unique_ptr<Communicator>>;

constexpr absl::Duration kTimeout = absl::Minutes(1);

Group CreateLocal(int world_size) {
  return ValueOrThrow(CreateLocalGroup(world_size, {kTimeout}));
}

Group CreateGloo(int world_size) {
  return ValueOrThrow(testing::CreateGlooGroup(world_size, kTimeout));
}

Group CreateSharedMemory(int world_size) {
  return ValueOrThrow(testing::CreateSharedMemoryGroup(world_size, kTimeout));
}

// A collective of one rank, with buffers of its own.
struct Exchange {
  std::function<absl::Status()> run;
  int64_t traffic;  // the least bytes that this rank reads and writes
};
using MakeExchange = Exchange (*)(Communicator*, int64_t bytes);

absl::Status Finish(absl::StatusOr<std::unique_ptr<Work>> work) {
  if (!work.ok()) return work.status();
  return (*work)->Wait(absl::Now() + kTimeout);
}

at::Tensor ShardOf(const at::Tensor& whole, const Communicator& comm) {
  const int64_t size = whole.numel() / comm.world_size();
  return whole.narrow(0, comm.rank() * size, size);
}

// Runs in place in memory that the backend reaches best, as the library does.
template <Collective collective>
Exchange Plain(Communicator* comm, int64_t bytes) {
  const int64_t row = int64_t{4} * comm->world_size();
  const at::Tensor whole = comm->AllocateSymmetric(bytes / row * row)
                               .value()
                               .zero_()
                               .view(at::kFloat);
  const at::Tensor shard = ShardOf(whole, *comm);
  const auto all = static_cast<int64_t>(whole.nbytes());
  const auto part = static_cast<int64_t>(shard.nbytes());
  const int64_t gather = 2 * (all - part);
  const int64_t reduce = all + part;
  switch (collective) {
    case Collective::kAllGather:
      return {[=] { return Finish(comm->AllGather(whole, shard, "bench")); },
              gather};
    case Collective::kReduceScatter:
      return {[=] {
                return Finish(
                    comm->ReduceScatter(shard, whole, ReduceOp::kSum, "bench"));
              },
              reduce};
    default:
      return {[=] {
                return Finish(comm->AllReduce(whole, ReduceOp::kSum, "bench"));
              },
              gather + reduce};
  }
}

// All ranks read one memory of `bytes`, float32 or, after a cast, bfloat16.
template <bool casts>
Exchange Common(Communicator* comm, int64_t bytes) {
  const auto common =
      std::make_shared<CommonMemory>(comm->AllocateCommon(bytes).value());
  const at::Tensor whole =
      common->memory.view(casts ? at::kBFloat16 : at::kFloat);
  const at::Tensor shard = ShardOf(whole, *comm);
  const at::Tensor source = at::ones({casts ? shard.numel() : 0});
  const size_t cast = casts ? source.nbytes() + shard.nbytes() : 0;
  const auto run = [=]() -> absl::Status {
    common->fence->Arrive();
    FSDP_RETURN_IF_ERROR(common->fence->Wait(absl::Now() + kTimeout));
    if (casts) shard.copy_(source);
    FSDP_RETURN_IF_ERROR(Finish(comm->AllGather(whole, shard, "bench")));
    const auto* words = static_cast<const uint64_t*>(whole.const_data_ptr());
    uint64_t any = 0;
    for (size_t i = 0; i < whole.nbytes() / sizeof(uint64_t); ++i) {
      any |= words[i];
    }
    benchmark::DoNotOptimize(any);
    return absl::OkStatus();
  };
  return {run, static_cast<int64_t>(whole.nbytes() + cast)};
}

// Returns the least seconds of a few runs.
double LeastSeconds(const std::function<void()>& fn) {
  double least = Seconds(fn);
  for (int i = 1; i < 5; ++i) least = std::min(least, Seconds(fn));
  return least;
}

double MemcpySeconds(int64_t bytes) {
  const std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  return LeastSeconds([&] {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::DoNotOptimize(to.data());
  });
}

// Returns the bytes read and written per second by `threads` that copy `bytes`
// in all at the same time, the most of a few runs.
double BytesPerSecond(int threads, int64_t bytes) {
  constexpr int64_t kLeastBytes = 64 << 20;  // hides the start of threads
  const int64_t part = bytes / threads;
  const int64_t repeats = std::max<int64_t>(1, kLeastBytes / bytes);
  std::vector<std::vector<char>> from(threads, std::vector<char>(part, 1));
  std::vector<std::vector<char>> to(threads, std::vector<char>(part));
  const auto copy = [&](int thread) {
    for (int64_t i = 0; i < repeats; ++i) {
      std::memcpy(to[thread].data(), from[thread].data(), part);
      benchmark::DoNotOptimize(to[thread].data());
    }
  };
  const double seconds = LeastSeconds([&] { OnAllRanks(threads, copy); });
  return static_cast<double>(2 * part * threads * repeats) / seconds;
}

// Peers repeat the collective, which keeps them in step, until rank 0 stops.
void BM_Collective(benchmark::State& state, Group (*create)(int),
                   MakeExchange make) {
  const int64_t bytes = state.range(0);
  const Group group = create(static_cast<int>(state.range(1)));
  const double memcpy_seconds = MemcpySeconds(bytes);
  const double bytes_per_second =
      BytesPerSecond(static_cast<int>(group.size()), bytes);
  std::vector<std::thread> peers;
  for (size_t rank = 1; rank < group.size(); ++rank) {
    peers.emplace_back([&, rank] {
      const Exchange peer = make(group[rank].get(), bytes);
      while (peer.run().ok()) {
      }
    });
  }
  const Exchange rank = make(group[0].get(), bytes);
  FSDP_CHECK(rank.run().ok());
  for (auto _ : state) FSDP_CHECK(rank.run().ok());
  group[0]->Abort(absl::CancelledError("measured"));
  for (std::thread& peer : peers) peer.join();
  const auto total = static_cast<double>(bytes * state.iterations());
  state.counters["GB/s"] =
      benchmark::Counter(total / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_memcpy"] = benchmark::Counter(
      memcpy_seconds * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  const auto traffic = static_cast<double>(rank.traffic * state.range(1));
  state.counters["of_bandwidth"] = benchmark::Counter(
      traffic / bytes_per_second * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  state.SetBytesProcessed(bytes * state.iterations());
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseRealTime()->ArgNames({"bytes", "ranks"});
  for (const int ranks : {2, 4}) {
    for (int64_t bytes : {64 << 10, 1 << 20, 16 << 20, 128 << 20}) {
      benchmark->Args({bytes, ranks});
    }
  }
}

#define COLLECTIVE(name, create, make) \
  BENCHMARK_CAPTURE(BM_Collective, name, create, make)->Apply(Sizes)

constexpr MakeExchange kGather = Plain<Collective::kAllGather>;
constexpr MakeExchange kScatter = Plain<Collective::kReduceScatter>;
constexpr MakeExchange kReduce = Plain<Collective::kAllReduce>;

COLLECTIVE(local_all_gather, CreateLocal, kGather);
COLLECTIVE(local_reduce_scatter, CreateLocal, kScatter);
COLLECTIVE(local_all_reduce, CreateLocal, kReduce);
COLLECTIVE(shared_memory_all_gather, CreateSharedMemory, kGather);
COLLECTIVE(shared_memory_reduce_scatter, CreateSharedMemory, kScatter);
COLLECTIVE(shared_memory_all_reduce, CreateSharedMemory, kReduce);
COLLECTIVE(shared_memory_all_gather_in_place, CreateSharedMemory,
           Common<false>);
COLLECTIVE(shared_memory_all_gather_cast, CreateSharedMemory, Common<true>);
COLLECTIVE(gloo_all_gather, CreateGloo, kGather);
COLLECTIVE(gloo_reduce_scatter, CreateGloo, kScatter);
COLLECTIVE(gloo_all_reduce, CreateGloo, kReduce);

}  // namespace
}  // namespace fsdp::comm
