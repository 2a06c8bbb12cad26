// Collectives between ranks that are threads of this process, in shared memory,
// over Gloo's TCP, and hierarchical: shared memory inside two hosts of half the
// ranks each, Gloo between them. Counters: `GB/s` of the whole tensor, and
// `of_memcpy`, the time of one thread's memcpy of the whole tensor, measured
// right before, over the time of the collective.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "benchmark/benchmark.h"
#include "comm/communicator.h"
#include "comm/host_layout.h"
#include "comm/local_communicator.h"
#include "comm/testing/gloo_group.h"
#include "comm/testing/hierarchical_group.h"
#include "comm/testing/shared_memory_group.h"
#include "comm/work.h"

namespace fsdp::comm {
namespace {

using Group = std::vector<std::unique_ptr<Communicator>>;

constexpr absl::Duration kTimeout = absl::Minutes(1);

Group CreateLocal(int world_size) {
  auto group = CreateLocalGroup(world_size, {kTimeout});
  FSDP_CHECK(group.ok());
  return *std::move(group);
}

Group CreateGloo(int world_size) {
  auto group = testing::CreateGlooGroup(world_size, kTimeout);
  FSDP_CHECK(group.ok());
  return *std::move(group);
}

// Two hosts, by name only: what is between them is this machine's loopback.
Group CreateHierarchical(int world_size) {
  HostLayout layout;
  layout.num_hosts = 2;
  layout.ranks_per_host = world_size / 2;
  auto group =
      testing::CreateHierarchicalGroup(layout, testing::CreateSharedMemoryGroup,
                                       testing::CreateGlooGroup, kTimeout);
  FSDP_CHECK(group.ok());
  return *std::move(group);
}

// One rank's buffers and how it uses them: in place and in the memory that its
// group reaches best, as the library does.
class Rank {
 public:
  Rank(Communicator* comm, Collective collective, int64_t bytes)
      : comm_(comm),
        collective_(collective),
        whole_(Zeros(comm, bytes / 4 / comm->world_size())),
        shard_(whole_.narrow(0, comm->rank() * ShardSize(), ShardSize())) {}

  absl::Status Run() {
    auto work = Start();
    if (!work.ok()) return work.status();
    return (*work)->Wait(absl::Now() + kTimeout);
  }

 private:
  static at::Tensor Zeros(Communicator* comm, int64_t shard_size) {
    auto memory = comm->AllocateSymmetric(shard_size * comm->world_size() * 4);
    FSDP_CHECK(memory.ok());
    return memory->view(at::kFloat).zero_();
  }
  int64_t ShardSize() const { return whole_.numel() / comm_->world_size(); }

  absl::StatusOr<std::unique_ptr<Work>> Start() {
    switch (collective_) {
      case Collective::kAllGather:
        return comm_->AllGather(whole_, shard_, "bench");
      case Collective::kReduceScatter:
        return comm_->ReduceScatter(shard_, whole_, ReduceOp::kSum, "bench");
      default:
        return comm_->AllReduce(whole_, ReduceOp::kSum, "bench");
    }
  }

  Communicator* const comm_;
  const Collective collective_;
  const at::Tensor whole_;
  const at::Tensor shard_;
};

// The best of a few, in seconds.
double MemcpySeconds(int64_t bytes) {
  const std::vector<char> from(bytes, 1);
  std::vector<char> to(bytes);
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const absl::Time start = absl::Now();
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::DoNotOptimize(to.data());
    best = std::min(best, absl::ToDoubleSeconds(absl::Now() - start));
  }
  return best;
}

// Peers repeat the collective, which keeps them in step, until rank 0 stops.
void BM_Collective(benchmark::State& state, Group (*create)(int),
                   Collective collective) {
  const int64_t bytes = state.range(0);
  const Group group = create(static_cast<int>(state.range(1)));
  const double memcpy_seconds = MemcpySeconds(bytes);
  std::vector<std::thread> peers;
  for (size_t rank = 1; rank < group.size(); ++rank) {
    peers.emplace_back([&, rank] {
      Rank peer(group[rank].get(), collective, bytes);
      while (peer.Run().ok()) {
      }
    });
  }
  Rank rank(group[0].get(), collective, bytes);
  FSDP_CHECK(rank.Run().ok());
  for (auto _ : state) FSDP_CHECK(rank.Run().ok());
  group[0]->Abort(absl::CancelledError("measured"));
  for (std::thread& peer : peers) peer.join();
  const auto total = static_cast<double>(bytes * state.iterations());
  state.counters["GB/s"] =
      benchmark::Counter(total / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_memcpy"] = benchmark::Counter(
      memcpy_seconds * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  state.SetBytesProcessed(bytes * state.iterations());
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseRealTime()->ArgNames({"bytes", "ranks"});
  for (int ranks : {2, 4}) {
    for (int64_t bytes : {64 << 10, 1 << 20, 16 << 20, 128 << 20}) {
      benchmark->Args({bytes, ranks});
    }
  }
}

BENCHMARK_CAPTURE(BM_Collective, local_all_gather, CreateLocal,
                  Collective::kAllGather)
    ->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Collective, local_reduce_scatter, CreateLocal,
                  Collective::kReduceScatter)
    ->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Collective, local_all_reduce, CreateLocal,
                  Collective::kAllReduce)
    ->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Collective, gloo_all_gather, CreateGloo,
                  Collective::kAllGather)
    ->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Collective, gloo_reduce_scatter, CreateGloo,
                  Collective::kReduceScatter)
    ->Apply(Sizes);
BENCHMARK_CAPTURE(BM_Collective, gloo_all_reduce, CreateGloo,
                  Collective::kAllReduce)
    ->Apply(Sizes);

// What two ranks per host save of the bytes between hosts, beside gloo_* with
// as many ranks.
void HierarchicalSizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseRealTime()->ArgNames({"bytes", "ranks"});
  for (int64_t bytes : {64 << 10, 1 << 20, 16 << 20, 128 << 20}) {
    benchmark->Args({bytes, 4});
  }
}

BENCHMARK_CAPTURE(BM_Collective, hierarchical_all_gather, CreateHierarchical,
                  Collective::kAllGather)
    ->Apply(HierarchicalSizes);
BENCHMARK_CAPTURE(BM_Collective, hierarchical_reduce_scatter,
                  CreateHierarchical, Collective::kReduceScatter)
    ->Apply(HierarchicalSizes);
BENCHMARK_CAPTURE(BM_Collective, hierarchical_all_reduce, CreateHierarchical,
                  Collective::kAllReduce)
    ->Apply(HierarchicalSizes);

}  // namespace
}  // namespace fsdp::comm
