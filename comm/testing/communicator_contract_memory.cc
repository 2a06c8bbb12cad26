// Tests collectives between all kinds of memory that a Communicator gives, in
// place and not, also in groups that are parts of others.
#include <ATen/ops/empty.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "comm/testing/communicator_contract.h"

namespace fsdp::comm::testing {
namespace {

// The last one is common memory that all ranks gather into; of kCommon each has
// a part of its own.
enum class Kind { kPlain, kSymmetric, kCommon, kOneForAll };
constexpr Kind kKinds[] = {Kind::kPlain, Kind::kSymmetric, Kind::kCommon};
constexpr absl::string_view kNames[] = {"plain", "symmetric", "common"};
constexpr int64_t kSizes[] = {1, 16, 1021};
constexpr int64_t kLarge = 300'001;  // more than a backend sends at once

absl::string_view NameOf(Kind kind) { return kNames[static_cast<int>(kind)]; }

double Unset(int64_t /*i*/) { return 100; }

at::Tensor Plain(int64_t size) {
  return at::empty({size}, ContractTensor(at::kFloat));
}

// Allocates a tensor that must not outlive `memory`; it is plain if a backend
// has no common memory.
absl::StatusOr<at::Tensor> AllocateCommonTensor(Communicator& comm,
                                                int64_t size,
                                                CommonMemory* memory) {
  if (!comm.HasCommonMemory()) return Plain(size);
  FSDP_ASSIGN_OR_RETURN(
      *memory, comm.AllocateCommon(size * static_cast<int64_t>(sizeof(float))));
  return memory->memory.view(at::kFloat);
}

// Returns a tensor of this rank's own with value(i) at index i: of common
// memory, a part that no other rank uses.
absl::StatusOr<at::Tensor> Own(Communicator& comm, Kind kind, int64_t size,
                               ValueAt value) {
  at::Tensor tensor = Plain(size);
  if (kind == Kind::kSymmetric) {
    FSDP_ASSIGN_OR_RETURN(
        tensor, comm.AllocateSymmetric(static_cast<int64_t>(tensor.nbytes())));
    tensor = tensor.view(at::kFloat);
  }
  if (kind == Kind::kCommon) {
    CommonMemory memory;
    FSDP_ASSIGN_OR_RETURN(
        tensor, AllocateCommonTensor(comm, size * comm.world_size(), &memory));
    tensor = tensor.narrow(0, size * comm.rank(), size);
  }
  tensor.copy_(MakeTensor(tensor.options(), size, value));
  return tensor;
}

absl::StatusOr<at::Tensor> OwnValues(Communicator& comm, Kind kind,
                                     int64_t size) {
  return Own(comm, kind, size,
             [&](int64_t i) { return Value(comm.rank(), i); });
}

// Gathers from elsewhere, and from its own slice of the output.
absl::Status Gather(Communicator& comm, Kind from, Kind to, int64_t n) {
  const int64_t size = n * comm.world_size();
  for (const bool in_place : {false, true}) {
    CommonMemory memory;
    FSDP_ASSIGN_OR_RETURN(const at::Tensor out,
                          to == Kind::kOneForAll
                              ? AllocateCommonTensor(comm, size, &memory)
                              : Own(comm, to, size, Unset));
    FSDP_ASSIGN_OR_RETURN(at::Tensor in, OwnValues(comm, from, n));
    if (in_place) {
      in = out.narrow(0, comm.rank() * n, n).copy_(in);
    }
    FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(out, in, "gather")));
    FSDP_RETURN_IF_ERROR(CheckTensor(
        out, [n](int64_t i) { return Value(static_cast<int>(i / n), i % n); }));
  }
  return absl::OkStatus();
}

absl::Status ReduceScatter(Communicator& comm, Kind from, Kind to, int64_t n) {
  const int64_t size = n * comm.world_size();
  const auto expected = [&](int64_t i) {
    return Reduced(ReduceOp::kSum, comm.world_size(), comm.rank() * n + i);
  };
  FSDP_ASSIGN_OR_RETURN(at::Tensor in, OwnValues(comm, from, size));
  FSDP_ASSIGN_OR_RETURN(const at::Tensor out, Own(comm, to, n, Unset));
  FSDP_RETURN_IF_ERROR(
      Finish(comm.ReduceScatter(out, in, ReduceOp::kSum, "sums")));
  FSDP_RETURN_IF_ERROR(CheckTensor(out, expected));
  FSDP_ASSIGN_OR_RETURN(in, OwnValues(comm, from, size));
  const at::Tensor slice = in.narrow(0, comm.rank() * n, n);
  FSDP_RETURN_IF_ERROR(
      Finish(comm.ReduceScatter(slice, in, ReduceOp::kSum, "in place")));
  FSDP_RETURN_IF_ERROR(CheckTensor(slice, expected));
  FSDP_ASSIGN_OR_RETURN(in, OwnValues(comm, from, size));
  FSDP_RETURN_IF_ERROR(
      Finish(comm.ReduceScatterScaled(out, in, {0.5, true}, "scaled")));
  return CheckTensor(out, [&](int64_t i) { return 1.5 * expected(i); });
}

absl::Status AllToAll(Communicator& comm, Kind from, Kind to, int64_t n) {
  if (!comm.HasAllToAll()) return absl::OkStatus();
  const int64_t size = n * comm.world_size();
  FSDP_ASSIGN_OR_RETURN(const at::Tensor in, OwnValues(comm, from, size));
  FSDP_ASSIGN_OR_RETURN(const at::Tensor out, Own(comm, to, size, Unset));
  FSDP_RETURN_IF_ERROR(Finish(comm.AllToAll(out, in, "exchange")));
  return CheckTensor(out, [&](int64_t i) {
    return Value(static_cast<int>(i / n), comm.rank() * n + i % n);
  });
}

absl::Status AllReduceAndBroadcast(Communicator& comm, Kind kind, int64_t n) {
  FSDP_ASSIGN_OR_RETURN(at::Tensor tensor, OwnValues(comm, kind, n));
  FSDP_RETURN_IF_ERROR(Finish(comm.AllReduce(tensor, ReduceOp::kSum, "sum")));
  FSDP_RETURN_IF_ERROR(CheckTensor(tensor, [&](int64_t i) {
    return Reduced(ReduceOp::kSum, comm.world_size(), i);
  }));
  const int root = comm.world_size() - 1;
  FSDP_ASSIGN_OR_RETURN(tensor, OwnValues(comm, kind, n));
  FSDP_RETURN_IF_ERROR(Finish(comm.Broadcast(tensor, root, "last")));
  return CheckTensor(tensor, [root](int64_t i) { return Value(root, i); });
}

absl::Status AllCollectives(Communicator& comm, Kind from, Kind to, int64_t n) {
  FSDP_RETURN_IF_ERROR(Gather(comm, from, to, n));
  FSDP_RETURN_IF_ERROR(ReduceScatter(comm, from, to, n));
  FSDP_RETURN_IF_ERROR(AllToAll(comm, from, to, n));
  if (to != Kind::kPlain) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(Gather(comm, from, Kind::kOneForAll, n));
  return AllReduceAndBroadcast(comm, from, n);
}

absl::Status OnAllMemory(Communicator& comm) {
  for (const Kind from : kKinds) {
    for (const Kind to : kKinds) {
      for (const int64_t n : kSizes) {
        const absl::Status status = AllCollectives(comm, from, to, n);
        if (status.ok()) continue;
        return Annotate(status,
                        absl::StrCat(comm.ToString(), ", from ", NameOf(from),
                                     " to ", NameOf(to), " memory"));
      }
    }
  }
  return Gather(comm, Kind::kSymmetric, Kind::kPlain, kLarge);
}

// Reads a result, and overwrites it, while peers may still read the inputs.
absl::Status UseEarly(std::unique_ptr<Work> work, at::Tensor& out,
                      ValueAt expected) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  FSDP_RETURN_IF_ERROR(work->WaitForResult(deadline));
  FSDP_RETURN_IF_ERROR(CheckTensor(out, expected));
  out.fill_(7);
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  return CheckTensor(out, [](int64_t) { return 7; });
}

absl::Status UseResultsEarly(Communicator& comm, Kind from, Kind to,
                             int64_t n) {
  const int64_t size = n * comm.world_size();
  FSDP_ASSIGN_OR_RETURN(const at::Tensor part, OwnValues(comm, from, n));
  FSDP_ASSIGN_OR_RETURN(at::Tensor all, Own(comm, to, size, Unset));
  FSDP_ASSIGN_OR_RETURN(auto work, comm.AllGather(all, part, "gather"));
  FSDP_RETURN_IF_ERROR(UseEarly(std::move(work), all, [n](int64_t i) {
    return Value(static_cast<int>(i / n), i % n);
  }));
  FSDP_ASSIGN_OR_RETURN(const at::Tensor terms, OwnValues(comm, from, size));
  FSDP_ASSIGN_OR_RETURN(at::Tensor sum, Own(comm, to, n, Unset));
  FSDP_ASSIGN_OR_RETURN(work,
                        comm.ReduceScatter(sum, terms, ReduceOp::kSum, "sums"));
  return UseEarly(std::move(work), sum, [&](int64_t i) {
    return Reduced(ReduceOp::kSum, comm.world_size(), comm.rank() * n + i);
  });
}

TEST_P(CommunicatorContract, AResultIsItsOwnersBeforeTheInputsAreFree) {
  ExpectOkOn({1, 2, 3}, [](Communicator& comm) -> absl::Status {
    for (const Kind from : kKinds) {
      for (const Kind to : kKinds) {
        for (const int64_t n : {1, 1021}) {
          FSDP_RETURN_IF_ERROR(UseResultsEarly(comm, from, to, n));
        }
      }
    }
    return UseResultsEarly(comm, Kind::kSymmetric, Kind::kPlain, kLarge);
  });
}

TEST_P(CommunicatorContract, EveryKindOfMemoryWillDo) {
  ExpectOkOn({1, 2, 3}, OnAllMemory);
}

TEST_P(CommunicatorContract, SplitIntoSingleRanks) {
  ExpectOkOn({3}, [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto own, comm.Split(comm.rank(), 0));
    return OnAllMemory(*own);
  });
}

// One part has one rank of each host of four ranks, the other part has all
// others.
TEST_P(CommunicatorContract, SplitIntoPartsOfSeveralSizes) {
  ExpectOkOn({8}, [](Communicator& comm) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto part,
                          comm.Split(comm.rank() % 4 == 0 ? 0 : 1, 0));
    return OnAllMemory(*part);
  });
}

}  // namespace
}  // namespace fsdp::comm::testing
