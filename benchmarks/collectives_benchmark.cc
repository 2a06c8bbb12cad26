// Runs collectives between ranks that are threads of this process: of a local
// group, in shared memory as processes have it, over Gloo's TCP, and
// hierarchical, with shared memory inside two hosts of half the ranks each and
// Gloo between them. Counters: `GB/s` of the whole tensor; `of_memcpy`, the
// time of one thread's memcpy of the whole tensor, measured right before, over
// the time of the collective; `of_bandwidth`, the same for the bytes that all
// ranks have to read and write, at the speed at which as many threads copy side
// by side.
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
#include "comm/hierarchical/host_layout.h"
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

// The hosts are two by name only: between them is this machine's loopback.
Group CreateHierarchical(int world_size) {
  HostLayout layout;
  layout.num_hosts = 2;
  layout.ranks_per_host = world_size / 2;
  return ValueOrThrow(
      testing::CreateHierarchicalGroup(layout, testing::CreateSharedMemoryGroup,
                                       testing::CreateGlooGroup, kTimeout));
}

// Runs a collective on one rank, with buffers of its own.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual absl::Status Run() = 0;
  // Returns the least bytes that this rank reads and writes.
  virtual int64_t Traffic() const = 0;
};

absl::Status Finish(absl::StatusOr<std::unique_ptr<Work>> work) {
  if (!work.ok()) return work.status();
  return (*work)->Wait(absl::Now() + kTimeout);
}

// Runs in place in memory that the backend reaches best, as the library does.
class PlainExchange final : public Exchange {
 public:
  PlainExchange(Communicator* comm, Collective collective, int64_t bytes)
      : comm_(comm),
        collective_(collective),
        whole_(comm->AllocateSymmetric(bytes / 4 / comm->world_size() *
                                       comm->world_size() * 4)
                   .value()
                   .zero_()
                   .view(at::kFloat)),
        shard_(whole_.narrow(0, comm->rank() * ShardSize(), ShardSize())) {}

  absl::Status Run() override { return Finish(Start()); }

  int64_t Traffic() const override {
    const auto whole = static_cast<int64_t>(whole_.nbytes());
    const auto shard = static_cast<int64_t>(shard_.nbytes());
    const int64_t gather = 2 * (whole - shard);
    const int64_t reduce = whole + shard;
    switch (collective_) {
      case Collective::kAllGather:
        return gather;
      case Collective::kReduceScatter:
        return reduce;
      default:
        return gather + reduce;
    }
  }

 private:
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

// All ranks read one memory of `bytes`, float32 or, after a cast, bfloat16.
class CommonExchange final : public Exchange {
 public:
  CommonExchange(Communicator* comm, bool casts, int64_t bytes)
      : comm_(comm),
        casts_(casts),
        common_(comm->AllocateCommon(bytes).value()),
        whole_(common_.memory.view(casts ? at::kBFloat16 : at::kFloat)),
        shard_(whole_.narrow(0, comm->rank() * ShardSize(), ShardSize())),
        source_(at::ones({casts ? ShardSize() : 0})) {}

  absl::Status Run() override {
    common_.fence->Arrive();
    FSDP_RETURN_IF_ERROR(common_.fence->Wait(absl::Now() + kTimeout));
    if (casts_) shard_.copy_(source_);
    const absl::Status written =
        Finish(comm_->AllGather(whole_, shard_, "bench"));
    if (written.ok()) ReadAll();
    return written;
  }

  int64_t Traffic() const override {
    const size_t cast = casts_ ? source_.nbytes() + shard_.nbytes() : 0;
    return static_cast<int64_t>(whole_.nbytes() + cast);
  }

 private:
  int64_t ShardSize() const { return whole_.numel() / comm_->world_size(); }

  void ReadAll() const {
    const auto* words = static_cast<const uint64_t*>(whole_.const_data_ptr());
    const size_t count = whole_.nbytes() / sizeof(uint64_t);
    uint64_t any = 0;
    for (size_t i = 0; i < count; ++i) any |= words[i];
    benchmark::DoNotOptimize(any);
  }

  Communicator* const comm_;
  const bool casts_;
  const CommonMemory common_;
  const at::Tensor whole_;
  const at::Tensor shard_;
  const at::Tensor source_;
};

using MakeExchange = std::unique_ptr<Exchange> (*)(Communicator*, int64_t);

template <Collective collective>
std::unique_ptr<Exchange> Plain(Communicator* comm, int64_t bytes) {
  return std::make_unique<PlainExchange>(comm, collective, bytes);
}

template <bool casts>
std::unique_ptr<Exchange> Common(Communicator* comm, int64_t bytes) {
  return std::make_unique<CommonExchange>(comm, casts, bytes);
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
  const double seconds = LeastSeconds([&] {
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) {
      others.emplace_back(copy, thread);
    }
    copy(0);
    for (std::thread& other : others) other.join();
  });
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
      const auto peer = make(group[rank].get(), bytes);
      while (peer->Run().ok()) {
      }
    });
  }
  const auto rank = make(group[0].get(), bytes);
  FSDP_CHECK(rank->Run().ok());
  for (auto _ : state) FSDP_CHECK(rank->Run().ok());
  group[0]->Abort(absl::CancelledError("measured"));
  for (std::thread& peer : peers) peer.join();
  const auto total = static_cast<double>(bytes * state.iterations());
  state.counters["GB/s"] =
      benchmark::Counter(total / 1e9, benchmark::Counter::kIsRate);
  state.counters["of_memcpy"] = benchmark::Counter(
      memcpy_seconds * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  const auto traffic = static_cast<double>(rank->Traffic() * state.range(1));
  state.counters["of_bandwidth"] = benchmark::Counter(
      traffic / bytes_per_second * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
  state.SetBytesProcessed(bytes * state.iterations());
}

void SizesOn(benchmark::internal::Benchmark* benchmark, int ranks) {
  benchmark->UseRealTime()->ArgNames({"bytes", "ranks"});
  for (int64_t bytes : {64 << 10, 1 << 20, 16 << 20, 128 << 20}) {
    benchmark->Args({bytes, ranks});
  }
}
void Sizes(benchmark::internal::Benchmark* benchmark) {
  SizesOn(benchmark, 2);
  SizesOn(benchmark, 4);
}
// Shows how many bytes between hosts two ranks per host save, beside gloo_*
// with as many ranks.
void OnTwoHosts(benchmark::internal::Benchmark* benchmark) {
  SizesOn(benchmark, 4);
}

#define COLLECTIVE(name, create, make, sizes) \
  BENCHMARK_CAPTURE(BM_Collective, name, create, make)->Apply(sizes)

constexpr MakeExchange kGather = Plain<Collective::kAllGather>;
constexpr MakeExchange kScatter = Plain<Collective::kReduceScatter>;
constexpr MakeExchange kReduce = Plain<Collective::kAllReduce>;

COLLECTIVE(local_all_gather, CreateLocal, kGather, Sizes);
COLLECTIVE(local_reduce_scatter, CreateLocal, kScatter, Sizes);
COLLECTIVE(local_all_reduce, CreateLocal, kReduce, Sizes);
COLLECTIVE(shared_memory_all_gather, CreateSharedMemory, kGather, Sizes);
COLLECTIVE(shared_memory_reduce_scatter, CreateSharedMemory, kScatter, Sizes);
COLLECTIVE(shared_memory_all_reduce, CreateSharedMemory, kReduce, Sizes);
COLLECTIVE(shared_memory_all_gather_in_place, CreateSharedMemory, Common<false>,
           Sizes);
COLLECTIVE(shared_memory_all_gather_cast, CreateSharedMemory, Common<true>,
           Sizes);
COLLECTIVE(gloo_all_gather, CreateGloo, kGather, Sizes);
COLLECTIVE(gloo_reduce_scatter, CreateGloo, kScatter, Sizes);
COLLECTIVE(gloo_all_reduce, CreateGloo, kReduce, Sizes);
COLLECTIVE(hierarchical_all_gather, CreateHierarchical, kGather, OnTwoHosts);
COLLECTIVE(hierarchical_reduce_scatter, CreateHierarchical, kScatter,
           OnTwoHosts);
COLLECTIVE(hierarchical_all_reduce, CreateHierarchical, kReduce, OnTwoHosts);

}  // namespace
}  // namespace fsdp::comm
