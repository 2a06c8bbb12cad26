// Plays all ranks in one thread, with slots so small that little data is many
// chunks.
#include "comm/shared_memory/shared_operation.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <functional>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

constexpr float kUntouched = -77;
constexpr int64_t kMargin = 40;

// Returns numbers small enough for exact sums.
float Value(int rank, int64_t i) {
  return static_cast<float>((rank * int64_t{13} + i * 7) % 101);
}

at::Tensor Input(int rank, int64_t numel) {
  at::Tensor tensor = at::empty({numel});
  auto* data = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < numel; ++i) data[i] = Value(rank, i);
  return tensor;
}

// An output between two margins that nothing may write.
class Output {
 public:
  explicit Output(int64_t numel)
      : whole_(at::full({numel + 2 * kMargin}, kUntouched)) {}

  at::Tensor tensor() const {
    return whole_.narrow(0, kMargin, whole_.numel() - 2 * kMargin);
  }
  // Returns the first place with another value than it should have, or -1.
  int64_t Mismatch(const std::function<float(int64_t)>& expected) const {
    const auto* data = whole_.const_data_ptr<float>();
    for (int64_t i = 0; i < whole_.numel(); ++i) {
      const int64_t place = i - kMargin;
      const bool inside = place >= 0 && place < whole_.numel() - 2 * kMargin;
      if (data[i] != (inside ? expected(place) : kUntouched)) return i;
    }
    return -1;
  }

 private:
  const at::Tensor whole_;
};

struct Case {
  int world_size;
  int64_t numel;      // of an output of a reduction, else of one rank's part
  unsigned in_place;  // bit r: the others read the input of rank r where it is
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (int world_size : {1, 2, 3, 5}) {
    for (int64_t numel : {0, 1, 15, 16, 17, 32, 33, 64, 333}) {
      for (unsigned in_place : {0u, 2u, 31u}) {
        cases.push_back({world_size, numel, in_place});
      }
    }
  }
  return cases;
}

// All ranks' parts of one collective.
class World {
 public:
  World(const Case& sizes, const std::vector<CollectiveArgs>& buffers)
      : sizes_(sizes), slot_bytes_(int64_t{128} * sizes.world_size) {
    for (int rank = 0; rank < sizes.world_size; ++rank) {
      operations_.emplace_back(buffers[rank], rank, sizes.world_size,
                               slot_bytes_);
      slots_.emplace_back(slot_bytes_);
    }
  }

  void Run() {
    const int64_t num_chunks = operations_[0].num_chunks();
    const bool at_once = sizes_.in_place == 31u;
    for (int64_t chunk = 0; chunk < (at_once ? 1 : num_chunks); ++chunk) {
      for (int rank = 0; rank < sizes_.world_size; ++rank) {
        if (!InPlace(rank)) {
          operations_[rank].Stage(chunk, slots_[rank].data());
        }
      }
      for (int rank = 0; rank < sizes_.world_size; ++rank) {
        operations_[rank].Take(chunk, at_once ? num_chunks : chunk + 1,
                               SourcesOf(rank));
      }
    }
  }

  // Runs all parts as a large all-reduce does.
  void RunByParts() {
    for (int64_t chunk = 0; chunk < operations_[0].num_chunks(); ++chunk) {
      for (int rank = 0; rank < sizes_.world_size; ++rank) {
        operations_[rank].Stage(chunk, slots_[rank].data());
      }
      for (int rank = 0; rank < sizes_.world_size; ++rank) {
        operations_[rank].ReducePart(chunk, SourcesOf(rank),
                                     slots_[rank].data());
      }
      std::vector<SharedSource> slots;
      slots.reserve(slots_.size());
      for (auto& slot : slots_) slots.push_back({slot.data(), true});
      for (const SharedOperation& operation : operations_) {
        operation.TakeParts(chunk, slots);
      }
    }
  }

  const SharedOperation& operation() const { return operations_[0]; }

 private:
  bool InPlace(int rank) const { return (sizes_.in_place >> rank & 1) != 0; }

  // A rank reads its own input where it is.
  std::vector<SharedSource> SourcesOf(int reader) const {
    std::vector<SharedSource> sources;
    for (int rank = 0; rank < sizes_.world_size; ++rank) {
      const bool staged = rank != reader && !InPlace(rank);
      sources.push_back({staged ? slots_[rank].data()
                                : static_cast<const char*>(
                                      operations_[rank].input().data_ptr()),
                         staged});
    }
    return sources;
  }

  const Case sizes_;
  const int64_t slot_bytes_;
  std::vector<SharedOperation> operations_;
  std::vector<std::vector<char>> slots_;
};

float SumAt(int world_size, int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += Value(rank, i);
  return sum;
}

TEST(SharedOperationTest, HasAsManyChunksAsAreNotEmptyAndAtLeastOne) {
  const auto chunks = [](int64_t bytes) {
    const CollectiveArgs buffers = {Collective::kAllGather,
                                    at::empty({2 * bytes}, at::kByte),
                                    at::empty({bytes}, at::kByte)};
    return SharedOperation(buffers, 0, 2, /*slot_bytes=*/256).num_chunks();
  };
  EXPECT_EQ(chunks(0), 1);
  EXPECT_EQ(chunks(1), 1);
  EXPECT_EQ(chunks(256), 1);
  EXPECT_EQ(chunks(257), 2);
  EXPECT_EQ(chunks(512), 2);
}

using Expected = std::function<float(int rank, int64_t i)>;

// Plays a collective whose outputs have `out_numel` elements and are as
// `expected`. Without `in_numel` the output of a rank is its input, too.
void ExpectOutputs(const Case& c, Collective collective, int64_t out_numel,
                   std::optional<int64_t> in_numel, const Expected& expected) {
  std::vector<Output> outs;
  std::vector<CollectiveArgs> buffers;
  for (int rank = 0; rank < c.world_size; ++rank) {
    outs.emplace_back(out_numel);
    CollectiveArgs own{collective, outs.back().tensor(), at::Tensor(),
                       ReduceOp::kSum, /*root=*/c.world_size - 1};
    if (in_numel) {
      own.in = Input(rank, *in_numel);
    } else {
      own.out.copy_(Input(rank, out_numel));
    }
    buffers.push_back(std::move(own));
  }
  World world(c, buffers);
  if (collective == Collective::kAllReduce) {
    EXPECT_TRUE(world.operation().reduces_by_parts());
    world.RunByParts();
  } else {
    world.Run();
  }
  for (int rank = 0; rank < c.world_size; ++rank) {
    EXPECT_EQ(outs[rank].Mismatch([&](int64_t i) { return expected(rank, i); }),
              -1)
        << c.world_size << " " << c.numel << " " << c.in_place;
  }
}

TEST(SharedOperationTest, AllGatherHasEveryRanksPartInTheOrderOfRanks) {
  for (const Case& c : Cases()) {
    ExpectOutputs(c, Collective::kAllGather, c.numel * c.world_size, c.numel,
                  [&](int /*rank*/, int64_t i) {
                    return Value(static_cast<int>(i / c.numel), i % c.numel);
                  });
  }
}

TEST(SharedOperationTest, AllToAllHasFromEveryRankThePartForThisOne) {
  for (const Case& c : Cases()) {
    const int64_t whole = c.numel * c.world_size;
    ExpectOutputs(c, Collective::kAllToAll, whole, whole,
                  [&](int rank, int64_t i) {
                    return Value(static_cast<int>(i / c.numel),
                                 rank * c.numel + i % c.numel);
                  });
  }
}

TEST(SharedOperationTest, ReduceScatterHasThisRanksPartOfTheSum) {
  for (const Case& c : Cases()) {
    ExpectOutputs(c, Collective::kReduceScatter, c.numel,
                  c.numel * c.world_size, [&](int rank, int64_t i) {
                    return SumAt(c.world_size, rank * c.numel + i);
                  });
  }
}

TEST(SharedOperationTest, BroadcastHasTheRootsAndLeavesItAsItIs) {
  for (const Case& c : Cases()) {
    if (c.in_place != 0) continue;
    ExpectOutputs(
        c, Collective::kBroadcast, c.numel, std::nullopt,
        [&](int /*rank*/, int64_t i) { return Value(c.world_size - 1, i); });
  }
}

TEST(SharedOperationTest, AllReduceOfMuchGoesByPartsAndIsTheSum) {
  for (int world_size : {2, 3, 5}) {
    for (int64_t numel : {8193, 8208, 9001}) {
      ExpectOutputs(
          {world_size, numel, 0}, Collective::kAllReduce, numel, std::nullopt,
          [&](int /*rank*/, int64_t i) { return SumAt(world_size, i); });
    }
  }
}

// Each thread of LibTorch's takes a part.
TEST(SharedOperationTest, ThreadsShareScaledSums) {
  const int before = at::get_num_threads();
  at::set_num_threads(4);
  constexpr int64_t kNumel = 300'001;
  for (bool accumulate : {false, true}) {
    std::vector<Output> outs;
    std::vector<CollectiveArgs> buffers;
    for (int rank : {0, 1}) {
      outs.emplace_back(kNumel);
      outs.back().tensor().fill_(3);
      buffers.push_back({Collective::kReduceScatter, outs.back().tensor(),
                         Input(rank, 2 * kNumel), ReduceOp::kSum, 0,
                         ScaledSum{0.5, accumulate}});
    }
    World({2, kNumel, 31}, buffers).Run();
    for (int rank : {0, 1}) {
      EXPECT_EQ(outs[rank].Mismatch([&](int64_t i) {
        return SumAt(2, rank * kNumel + i) / 2 + (accumulate ? 3 : 0);
      }),
                -1)
          << accumulate;
    }
  }
  at::set_num_threads(before);
}

}  // namespace
}  // namespace fsdp::comm
