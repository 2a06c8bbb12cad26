#include "comm/testing/communicator_contract.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <optional>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/testing/check_that.h"
#include "base/testing/compare_tensors.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm::testing {

std::ostream& operator<<(std::ostream& out, const ContractBackend& backend) {
  return out << backend.name;
}

std::string BackendName(const ::testing::TestParamInfo<ContractBackend>& info) {
  return info.param.name;
}

Group CommunicatorContract::Create(int world_size, absl::Duration timeout) {
  absl::StatusOr<Group> group = GetParam().create(world_size, timeout);
  if (!group.ok()) std::cerr << group.status() << std::endl;
  return std::move(group).value();
}

void CommunicatorContract::ExpectOkOn(const std::vector<int>& world_sizes,
                                      const RankFunction& fn) {
  bool any = false;
  for (const int world_size : world_sizes) {
    if (!CanHave(world_size)) continue;
    any = true;
    EXPECT_OK(AllOk(RunAll(Create(world_size), fn))) << world_size;
  }
  if (!any) GTEST_SKIP() << "it has fewer ranks here";
}

std::vector<absl::Status> RunAll(const Group& group, const RankFunction& fn) {
  return RunRanks(group, [&fn](Communicator& comm) {
    CommunicatorContract::GetParam().enter(comm.rank());
    return fn(comm);
  });
}

at::TensorOptions ContractTensor(at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(
      CommunicatorContract::GetParam().device);
}

double Value(int rank, int64_t i) {
  return static_cast<double>((rank * int64_t{7} + i * 3) % 9);
}

double Reduced(ReduceOp op, int world_size, int64_t i) {
  double result = Value(0, i);
  for (int rank = 1; rank < world_size; ++rank) {
    const double value = Value(rank, i);
    if (op == ReduceOp::kSum) result += value;
    if (op == ReduceOp::kMin) result = std::min(result, value);
    if (op == ReduceOp::kMax) result = std::max(result, value);
  }
  return result;
}

at::Tensor MakeTensor(const at::TensorOptions& options, int64_t size,
                      ValueAt value) {
  at::Tensor tensor = at::empty({size}, at::TensorOptions().dtype(at::kDouble));
  auto* data = static_cast<double*>(tensor.mutable_data_ptr());
  for (int64_t i = 0; i < size; ++i) data[i] = value(i);
  return tensor.to(options);
}

absl::Status CheckTensor(const at::Tensor& tensor, ValueAt expected) {
  const at::Tensor copy = tensor.cpu().to(at::kDouble);
  const auto* data = static_cast<const double*>(copy.const_data_ptr());
  for (int64_t i = 0; i < copy.numel(); ++i) {
    if (data[i] == expected(i)) continue;
    return absl::InternalError(absl::StrCat(
        DtypeName(tensor.scalar_type()), " x ", tensor.numel(), ": element ", i,
        " is ", data[i], " and should be ", expected(i)));
  }
  return absl::OkStatus();
}

namespace {

using ::fsdp::testing::CheckThat;

constexpr int64_t kSizes[] = {0, 1, 7, 1021};
constexpr at::ScalarType kDtypes[] = {at::kFloat,    at::kDouble, at::kHalf,
                                      at::kBFloat16, at::kInt,    at::kLong,
                                      at::kByte};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};

at::Tensor MakeTensor(at::ScalarType dtype, int64_t size, ValueAt value) {
  return comm::testing::MakeTensor(ContractTensor(dtype), size, value);
}

absl::Status ForEachTensor(
    absl::FunctionRef<absl::Status(at::ScalarType dtype, int64_t n)> fn) {
  for (at::ScalarType dtype : kDtypes) {
    for (int64_t n : kSizes) FSDP_RETURN_IF_ERROR(fn(dtype, n));
  }
  return absl::OkStatus();
}

bool SameBits(const at::Tensor& first, const at::Tensor& second) {
  const at::Tensor a = first.cpu();
  const at::Tensor b = second.cpu();
  return a.nbytes() == b.nbytes() &&
         (a.nbytes() == 0 ||
          std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

absl::Status GatherOnce(Communicator& comm, at::ScalarType dtype, int64_t n,
                        bool in_place) {
  const int rank = comm.rank();
  at::Tensor out =
      MakeTensor(dtype, n * comm.world_size(), [](int64_t) { return 100.0; });
  at::Tensor in =
      MakeTensor(dtype, n, [rank](int64_t i) { return Value(rank, i); });
  if (in_place) {
    at::Tensor slice = out.narrow(0, rank * n, n);
    slice.copy_(in);
    in = slice;
  }
  FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(out, in, "gather")));
  return CheckTensor(
      out, [n](int64_t i) { return Value(static_cast<int>(i / n), i % n); });
}

absl::Status ReduceScatterOnce(Communicator& comm, at::ScalarType dtype,
                               ReduceOp op, int64_t n, bool in_place) {
  const int rank = comm.rank();
  at::Tensor in = MakeTensor(dtype, n * comm.world_size(),
                             [rank](int64_t i) { return Value(rank, i); });
  at::Tensor out = in_place ? in.narrow(0, rank * n, n)
                            : MakeTensor(dtype, n, [](int64_t) { return 100; });
  FSDP_RETURN_IF_ERROR(Finish(comm.ReduceScatter(out, in, op, "reduce")));
  return CheckTensor(out, [&](int64_t i) {
    return Reduced(op, comm.world_size(), rank * n + i);
  });
}

absl::Status ScaledOnce(Communicator& comm, at::ScalarType from,
                        at::ScalarType to, int64_t n, bool accumulate) {
  const int rank = comm.rank();
  const at::Tensor in =
      MakeTensor(from, n * comm.world_size(),
                 [rank](int64_t i) { return Value(rank, i); });
  const at::Tensor out = MakeTensor(to, n, [](int64_t) { return 100.0; });
  FSDP_RETURN_IF_ERROR(
      Finish(comm.ReduceScatterScaled(out, in, {0.25, accumulate}, "scaled")));
  return CheckTensor(out, [&](int64_t i) {
    return (accumulate ? 100 : 0) +
           Reduced(ReduceOp::kSum, comm.world_size(), rank * n + i) / 4;
  });
}

// Does nothing if the communicator has no all-to-all.
absl::Status AllToAllOnce(Communicator& comm, at::ScalarType dtype, int64_t n) {
  if (!comm.HasAllToAll()) return absl::OkStatus();
  const int rank = comm.rank();
  const int64_t size = n * comm.world_size();
  const at::Tensor in =
      MakeTensor(dtype, size, [&](int64_t i) { return Value(rank, i); });
  const at::Tensor out = MakeTensor(dtype, size, [](int64_t) { return 100.0; });
  FSDP_RETURN_IF_ERROR(Finish(comm.AllToAll(out, in, "exchange")));
  FSDP_RETURN_IF_ERROR(
      CheckTensor(in, [&](int64_t i) { return Value(rank, i); }));
  return CheckTensor(out, [&](int64_t i) {
    return Value(static_cast<int>(i / n), rank * n + i % n);
  });
}

absl::Status AllReduceOnce(Communicator& comm, at::ScalarType dtype,
                           ReduceOp op, int64_t n) {
  const at::Tensor tensor =
      MakeTensor(dtype, n, [&](int64_t i) { return Value(comm.rank(), i); });
  FSDP_RETURN_IF_ERROR(Finish(comm.AllReduce(tensor, op, "sum")));
  return CheckTensor(
      tensor, [&](int64_t i) { return Reduced(op, comm.world_size(), i); });
}

absl::Status BroadcastOnce(Communicator& comm, at::ScalarType dtype, int root,
                           int64_t n) {
  const at::Tensor tensor =
      MakeTensor(dtype, n, [&](int64_t i) { return Value(comm.rank(), i); });
  FSDP_RETURN_IF_ERROR(Finish(comm.Broadcast(tensor, root, "weights")));
  return CheckTensor(tensor, [root](int64_t i) { return Value(root, i); });
}

TEST_P(CommunicatorContract, KnowsItsPlace) {
  if (!CanHave(3)) GTEST_SKIP() << "it has fewer than 3 ranks here";
  const Group group = Create(3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(group[rank]->rank(), rank);
    EXPECT_EQ(group[rank]->world_size(), 3);
    EXPECT_EQ(group[rank]->default_timeout(), absl::Seconds(30));
    EXPECT_THAT(group[rank]->ToString(),
                ::testing::EndsWith(absl::StrCat("rank ", rank, " of 3")));
  }
}

// Ranks decide by these alike, and for parts as for the whole.
TEST_P(CommunicatorContract, CapabilitiesAreThoseOfAllRanksAndParts) {
  if (!CanHave(3)) GTEST_SKIP() << "it has fewer than 3 ranks here";
  const Group group = Create(3);
  const bool prefers = group[0]->PrefersScaledInputs();
  const bool captured = group[0]->CanBeCaptured();
  EXPECT_FALSE(captured && GetParam().device.is_cpu());
  EXPECT_OK(AllOk(RunAll(group, [&](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto part, comm.Split(comm.rank() % 2, comm.rank()));
    for (const Communicator* each : {&comm, part.get()}) {
      if (each->PrefersScaledInputs() != prefers ||
          each->CanBeCaptured() != captured) {
        return absl::InternalError(each->ToString());
      }
    }
    return absl::OkStatus();
  })));
}

// Returns OK if `status` is what `comm` says about having the capability.
absl::Status CheckCapability(const Communicator& comm, bool has,
                             const absl::Status& status) {
  const std::string name =
      absl::StrCat("rank ", comm.rank(), " of ", comm.world_size());
  const bool is_refused = absl::IsUnimplemented(status) &&
                          absl::StrContains(status.message(), name);
  if (has ? status.ok() : is_refused) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(comm.ToString(), " says ", has,
                                          ", but: ", status.ToString()));
}

absl::Status DoesWhatItSays(Communicator& comm) {
  constexpr int64_t kBytes = 1000;
  const bool has_exchange = comm.HasAllToAll();
  const int64_t size = comm.world_size();
  const at::Tensor in = MakeTensor(at::kFloat, size, [](int64_t) { return 1; });
  const at::Tensor out =
      MakeTensor(at::kFloat, size, [](int64_t) { return 0; });
  FSDP_RETURN_IF_ERROR(CheckCapability(
      comm, has_exchange, Finish(comm.AllToAll(out, in, "exchange"))));
  const bool has_common = comm.HasCommonMemory();
  const auto common = comm.AllocateCommon(kBytes);
  FSDP_RETURN_IF_ERROR(CheckCapability(comm, has_common, common.status()));
  if (has_common) {
    FSDP_RETURN_IF_ERROR(CheckThat(common->memory.numel(), kBytes, "bytes"));
  }
  // All ranks have said the same.
  const at::Tensor said = MakeTensor(at::kInt, 2, [&](int64_t i) {
    return static_cast<double>(i == 0 ? has_exchange : has_common);
  });
  FSDP_RETURN_IF_ERROR(Finish(comm.AllReduce(said, ReduceOp::kSum, "said")));
  return CheckTensor(said, [&](int64_t i) {
    return static_cast<double>((i == 0 ? has_exchange : has_common) * size);
  });
}

TEST_P(CommunicatorContract, DoesWhatItSaysToHaveAndRefusesTheRestByName) {
  ExpectOkOn({1, 4}, [](Communicator& comm) -> absl::Status {
    FSDP_RETURN_IF_ERROR(DoesWhatItSays(comm));
    FSDP_ASSIGN_OR_RETURN(auto part, comm.Split(comm.rank() / 2, 0));
    return DoesWhatItSays(*part);
  });
}

TEST_P(CommunicatorContract, AllGatherConcatenates) {
  ExpectOkOn({1, 2, 3, 5, 8}, [](Communicator& comm) -> absl::Status {
    return ForEachTensor([&](at::ScalarType dtype, int64_t n) -> absl::Status {
      FSDP_RETURN_IF_ERROR(GatherOnce(comm, dtype, n, false));
      return GatherOnce(comm, dtype, n, true);
    });
  });
}

TEST_P(CommunicatorContract, ReduceScatterReducesEveryDtype) {
  ExpectOkOn({1, 2, 3, 5, 8}, [](Communicator& comm) -> absl::Status {
    return ForEachTensor([&](at::ScalarType dtype, int64_t n) -> absl::Status {
      for (ReduceOp op : kOps) {
        const bool in_place = op != ReduceOp::kMax;
        FSDP_RETURN_IF_ERROR(ReduceScatterOnce(comm, dtype, op, n, in_place));
      }
      return ReduceScatterOnce(comm, dtype, ReduceOp::kSum, n, false);
    });
  });
}

TEST_P(CommunicatorContract, ScaledSumsGoIntoAnyFloatingDtype) {
  ExpectOkOn({1, 2, 3, 5, 8}, [](Communicator& comm) -> absl::Status {
    for (at::ScalarType from : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (int64_t n : kSizes) {
        FSDP_RETURN_IF_ERROR(ScaledOnce(comm, from, at::kFloat, n, false));
        FSDP_RETURN_IF_ERROR(ScaledOnce(comm, from, at::kFloat, n, true));
      }
      FSDP_RETURN_IF_ERROR(ScaledOnce(comm, from, at::kDouble, 5, true));
      FSDP_RETURN_IF_ERROR(ScaledOnce(comm, from, at::kHalf, 5, false));
    }
    // The sum of these fits into 16 bits only once it is scaled.
    const int ranks = comm.world_size();
    const auto large = [](int64_t) { return 40000.0; };
    const at::Tensor out = MakeTensor(at::kHalf, 5, large) * 0;
    FSDP_RETURN_IF_ERROR(Finish(comm.ReduceScatterScaled(
        out, MakeTensor(at::kFloat, int64_t{5} * ranks, large), {1.0 / ranks},
        "s")));
    return CheckTensor(out, large);
  });
}

TEST_P(CommunicatorContract, SumsIntoOneOutputAreMadeInTheirOrder) {
  ExpectOkOn({1, 2, 3, 5, 8}, [](Communicator& comm) -> absl::Status {
    constexpr int64_t kSize = 1021;
    const auto input = [&] {
      return MakeTensor(at::kFloat, kSize * comm.world_size(),
                        [&](int64_t i) { return Value(comm.rank(), i); });
    };
    const at::Tensor out =
        MakeTensor(at::kFloat, kSize, [](int64_t) { return 100.0; });
    constexpr double kScales[] = {0.5, 2, 8};
    std::vector<std::unique_ptr<Work>> works;
    for (const double scale : kScales) {
      FSDP_ASSIGN_OR_RETURN(
          auto work, comm.ReduceScatterScaled(
                         out, input(), {scale, !works.empty()}, "one output"));
      works.push_back(std::move(work));
    }
    const at::Tensor sum = MakeTensor(at::kFloat, kSize, [&](int64_t i) {
      return Reduced(ReduceOp::kSum, comm.world_size(),
                     comm.rank() * kSize + i);
    });
    const at::Tensor sums[] = {sum * 0.5, sum * 2.5, sum * 10.5};
    for (size_t done = 0; done < works.size(); ++done) {
      FSDP_RETURN_IF_ERROR(works[done]->Wait(absl::Now() + absl::Seconds(30)));
      at::Tensor is_one_of_them = out.eq(sums[done]);
      for (size_t later = done + 1; later < works.size(); ++later) {
        is_one_of_them = is_one_of_them | out.eq(sums[later]);
      }
      FSDP_RETURN_IF_ERROR(::fsdp::testing::Check(
          is_one_of_them.all().item<bool>(), absl::StrCat("after sum ", done)));
    }
    return absl::OkStatus();
  });
}

TEST_P(CommunicatorContract, WhatInferenceModeHasStartedEndsOutsideIt) {
  ExpectOkOn({1, 2}, [](Communicator& comm) -> absl::Status {
    constexpr int64_t kSize = 1021;
    const int rank = comm.rank();
    const int64_t whole = kSize * comm.world_size();
    const auto value = [rank](int64_t i) { return Value(rank, i); };
    const auto zero = [](int64_t) { return 0.0; };
    const auto sum = [&](int64_t i) {
      return Reduced(ReduceOp::kSum, comm.world_size(), rank * kSize + i);
    };
    std::optional<c10::InferenceMode> inference(true);
    const at::Tensor gathered = MakeTensor(at::kFloat, whole, zero);
    const at::Tensor added = MakeTensor(at::kDouble, kSize, zero);
    FSDP_ASSIGN_OR_RETURN(
        const auto gathers,
        comm.AllGather(gathered, MakeTensor(at::kFloat, kSize, value), "g"));
    FSDP_ASSIGN_OR_RETURN(
        const auto adds,
        comm.ReduceScatterScaled(added, MakeTensor(at::kFloat, whole, value),
                                 {/*scale=*/1, /*accumulate=*/true}, "a"));
    inference.reset();
    for (const auto* work : {&gathers, &adds}) {
      FSDP_RETURN_IF_ERROR((*work)->Wait(absl::Now() + absl::Seconds(30)));
    }
    FSDP_RETURN_IF_ERROR(CheckTensor(added, sum));
    return CheckTensor(gathered, [](int64_t i) {
      return Value(static_cast<int>(i / kSize), i % kSize);
    });
  });
}

TEST_P(CommunicatorContract, AllToAllGivesEveryRankItsPartOfEachInput) {
  ExpectOkOn({1, 2, 3, 5, 8}, [](Communicator& comm) -> absl::Status {
    return ForEachTensor([&](at::ScalarType dtype, int64_t n) {
      return AllToAllOnce(comm, dtype, n);
    });
  });
}

TEST_P(CommunicatorContract, AllReduceReducesEveryDtype) {
  ExpectOkOn({1, 2, 3, 5, 8}, [](Communicator& comm) -> absl::Status {
    return ForEachTensor([&](at::ScalarType dtype, int64_t n) -> absl::Status {
      for (ReduceOp op : kOps) {
        FSDP_RETURN_IF_ERROR(AllReduceOnce(comm, dtype, op, n));
      }
      return absl::OkStatus();
    });
  });
}

TEST_P(CommunicatorContract, BroadcastCopiesFromEveryRoot) {
  ExpectOkOn({1, 2, 3, 5, 8}, [](Communicator& comm) -> absl::Status {
    for (int root = 0; root < comm.world_size(); ++root) {
      for (int64_t n : kSizes) {
        FSDP_RETURN_IF_ERROR(BroadcastOnce(comm, kDtypes[root % 7], root, n));
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(CommunicatorContract, LargeBuffers) {
  constexpr int64_t kLarge = 1'000'003;  // 4 MB of float32, prime
  ExpectOkOn({2, 3}, [](Communicator& comm) -> absl::Status {
    FSDP_RETURN_IF_ERROR(GatherOnce(comm, at::kFloat, kLarge, true));
    FSDP_RETURN_IF_ERROR(
        ReduceScatterOnce(comm, at::kFloat, ReduceOp::kSum, kLarge, true));
    FSDP_RETURN_IF_ERROR(
        ScaledOnce(comm, at::kFloat, at::kFloat, kLarge, true));
    FSDP_RETURN_IF_ERROR(AllToAllOnce(comm, at::kFloat, kLarge));
    FSDP_RETURN_IF_ERROR(
        AllReduceOnce(comm, at::kBFloat16, ReduceOp::kSum, kLarge));
    return BroadcastOnce(comm, at::kFloat, 1, kLarge);
  });
}

TEST_P(CommunicatorContract, SeveralInFlightAndWaitedForInAnyOrder) {
  ExpectOkOn({3}, [](Communicator& comm) -> absl::Status {
    std::vector<at::Tensor> tensors;
    std::vector<std::unique_ptr<Work>> works;
    for (int k = 0; k < 6; ++k) {
      tensors.push_back(MakeTensor(at::kFloat, 1000 * k + 1, [&](int64_t i) {
        return Value(comm.rank(), i + k);
      }));
      FSDP_ASSIGN_OR_RETURN(
          auto work, comm.AllReduce(tensors.back(), ReduceOp::kSum, "many"));
      works.push_back(std::move(work));
    }
    works[2].reset();  // done all the same, in its place
    for (int k : {5, 0, 4, 1, 3}) {
      FSDP_RETURN_IF_ERROR(works[k]->Wait(absl::Now() + absl::Seconds(30)));
    }
    for (int k = 0; k < 6; ++k) {
      FSDP_RETURN_IF_ERROR(CheckTensor(tensors[k], [&](int64_t i) {
        return Reduced(ReduceOp::kSum, comm.world_size(), i + k);
      }));
    }
    return works[0]->BlockCurrentStream();
  });
}

TEST_P(CommunicatorContract, InputsOfADroppedOperationMayBeWritten) {
  ExpectOkOn({3}, [](Communicator& comm) -> absl::Status {
    constexpr int64_t kSize = 100003;
    FSDP_ASSIGN_OR_RETURN(const at::Tensor bytes,
                          comm.AllocateSymmetric(kSize * sizeof(float)));
    const at::Tensor in = bytes.view(at::kFloat).fill_(-1);
    const at::Tensor dropped = at::empty({3 * kSize}, in.options());
    FSDP_RETURN_IF_ERROR(comm.AllGather(dropped, in, "dropped").status());
    in.copy_(MakeTensor(at::kFloat, kSize,
                        [&](int64_t i) { return Value(comm.rank(), i); }));
    const at::Tensor out = at::empty_like(dropped);
    FSDP_ASSIGN_OR_RETURN(const auto work, comm.AllGather(out, in, "used"));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + absl::Seconds(30)));
    return CheckTensor(out, [](int64_t i) {
      return Value(static_cast<int>(i / kSize), i % kSize);
    });
  });
}

// Random numbers, whose sum depends on the order.
at::Tensor RandomTensor(int seed, at::ScalarType dtype, int64_t size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  return MakeTensor(dtype, size, [&](int64_t) { return normal(random); });
}

TEST_P(CommunicatorContract, SumsAreTheSameBitsOnAllRanksAndEveryTime) {
  if (!CanHave(5)) GTEST_SKIP() << "it has fewer than 5 ranks here";
  constexpr int kRanks = 5;
  constexpr int64_t kSize = 10'007;
  for (at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    std::vector<at::Tensor> results(kRanks);
    const auto run = [&](Communicator& comm) -> absl::Status {
      at::Tensor& first = results[comm.rank()];
      for (int repeat = 0; repeat < 3; ++repeat) {
        const at::Tensor sum = RandomTensor(comm.rank(), dtype, kSize);
        FSDP_RETURN_IF_ERROR(
            Finish(comm.AllReduce(sum, ReduceOp::kSum, "sum")));
        if (repeat == 0) first = sum;
        if (SameBits(first, sum)) continue;
        return absl::InternalError(absl::StrCat(
            "sum ", repeat, " has other bits than the first, off by up to ",
            ::fsdp::testing::LargestDifference(first, sum)));
      }
      return absl::OkStatus();
    };
    ASSERT_OK(AllOk(RunAll(Create(kRanks), run)));
    for (const at::Tensor& result : results) {
      EXPECT_TRUE(SameBits(result, results[0]));
    }
    if (!GetParam().sums_in_rank_order) continue;
    at::Tensor expected = RandomTensor(0, dtype, kSize).to(at::kFloat);
    for (int rank = 1; rank < kRanks; ++rank) {
      expected.add_(RandomTensor(rank, dtype, kSize).to(at::kFloat));
    }
    EXPECT_TRUE(SameBits(results[0], expected.to(dtype)));
  }
}

TEST_P(CommunicatorContract, SplitMakesSubGroupsInTheOrderOfTheKeys) {
  ExpectOkOn({1, 3, 5}, [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto part,
                          comm.Split(comm.rank() % 2, /*key=*/-comm.rank()));
    // Of 5, ranks 0, 2, 4 become 2, 1, 0, and 1, 3 become 1, 0.
    const int size = (comm.world_size() + 1 - comm.rank() % 2) / 2;
    if (part->world_size() != size ||
        part->rank() != size - 1 - comm.rank() / 2) {
      return absl::InternalError(part->ToString());
    }
    const at::Tensor in = MakeTensor(
        at::kInt, 1, [&](int64_t) { return static_cast<double>(comm.rank()); });
    const at::Tensor out =
        MakeTensor(at::kInt, size, [](int64_t) { return 0.0; });
    FSDP_RETURN_IF_ERROR(Finish(part->AllGather(out, in, "part")));
    FSDP_RETURN_IF_ERROR(CheckTensor(out, [&](int64_t i) {
      return static_cast<double>(2 * (size - 1 - i) + comm.rank() % 2);
    }));
    FSDP_RETURN_IF_ERROR(GatherOnce(comm, at::kFloat, 3, false));
    return Finish(part->AllGather(out, in, "part"));
  });
}

TEST_P(CommunicatorContract, AllocatesAlignedMemory) {
  ExpectOkOn({2}, [](Communicator& comm) -> absl::Status {
    for (int64_t bytes : {0, 1, 1000}) {
      FSDP_ASSIGN_OR_RETURN(at::Tensor memory, comm.AllocateSymmetric(bytes));
      const auto address =
          reinterpret_cast<uintptr_t>(memory.mutable_data_ptr());
      FSDP_RETURN_IF_ERROR(CheckThat(memory.numel(), bytes, "bytes"));
      FSDP_RETURN_IF_ERROR(CheckThat(memory.scalar_type(), at::kByte, "dtype"));
      FSDP_RETURN_IF_ERROR(CheckThat(address % 64, 0u, "address modulo 64"));
    }
    if (comm.AllocateSymmetric(-1).ok()) return absl::InternalError("-1 bytes");
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace fsdp::comm::testing
