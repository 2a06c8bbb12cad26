// Scenarios of collectives and common memory.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "comm/communicator.h"
#include "comm/host/shared_host.h"
#include "comm/host/shared_segment.h"
#include "comm/shared_memory/shared_group.h"
#include "comm/shared_memory/shared_operation.h"
#include "testing/interleavings/ranks.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {
namespace {

using ::fsdp::comm::Collective;
using ::fsdp::comm::CollectiveArgs;
using ::fsdp::comm::SharedGroup;
using ::fsdp::comm::SharedSegment;

at::Tensor Floats(int64_t count) { return at::empty({count}, at::kFloat); }

at::Tensor SymmetricFloats(Rank& rank, int64_t count) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
  return rank.host->heap()
      ->MakeTensor(SharedSegment::Create(bytes).value(), 0, bytes)
      .view(at::kFloat);
}

// Returns what rank `rank` sends to rank `to` in call `call`.
float Sent(int call, int rank, int to) {
  return static_cast<float>(100 * (call + 1) + 10 * rank + to);
}

// One call of one rank: its buffers, and the expected result.
struct Prepared {
  Collective what;
  at::Tensor in;
  at::Tensor out;
  std::vector<float> expected;  // first elements of the parts of `out`
  std::shared_ptr<SharedGroup::Operation> operation;
};

float SumSentTo(int call, int to, int world_size) {
  float sum = 0;
  for (int peer = 0; peer < world_size; ++peer) sum += Sent(call, peer, to);
  return sum;
}

Prepared Prepare(Rank& rank, Call what, Memory memory, int call) {
  const int n = rank.world_size();
  Prepared prepared;
  prepared.what = what.what;
  const bool is_divided = what.what == Collective::kReduceScatter ||
                          what.what == Collective::kAllToAll;
  const bool is_in_place = what.what == Collective::kAllReduce ||
                           what.what == Collective::kBroadcast;
  const int receivers = is_divided ? n : 1;
  const int64_t count = receivers * what.part;
  prepared.in = memory == Memory::kSymmetric && !is_in_place
                    ? SymmetricFloats(rank, count)
                    : Floats(count);
  float* in = prepared.in.mutable_data_ptr<float>();
  if (what.part > 1) prepared.in.zero_();
  for (int to = 0; to < receivers; ++to) in[to] = Sent(call, rank.rank, to);
  switch (what.what) {
    case Collective::kAllGather:
      for (int r = 0; r < n; ++r) prepared.expected.push_back(Sent(call, r, 0));
      break;
    case Collective::kAllToAll:
      for (int r = 0; r < n; ++r) {
        prepared.expected.push_back(Sent(call, r, rank.rank));
      }
      break;
    case Collective::kReduceScatter:
      prepared.expected.push_back(SumSentTo(call, rank.rank, n));
      break;
    case Collective::kAllReduce:
      prepared.expected.push_back(SumSentTo(call, 0, n));
      break;
    default:
      prepared.expected.push_back(Sent(call, 0, 0));
  }
  prepared.out = is_in_place
                     ? std::exchange(prepared.in, at::Tensor())
                     : Floats(static_cast<int64_t>(prepared.expected.size()));
  return prepared;
}

absl::Status StartCall(Rank& rank, Prepared& prepared) {
  CollectiveArgs buffers = {prepared.what, prepared.out, prepared.in};
  const at::Tensor& counted =
      prepared.in.defined() ? prepared.in : prepared.out;
  auto operation = rank.group->Start(
      {buffers.collective, "unit", "float32", counted.numel(), ""}, buffers,
      rank.deadline);
  if (!operation.ok()) return operation.status();
  prepared.operation = *std::move(operation);
  return absl::OkStatus();
}

void ExpectReceived(const Rank& rank, const Prepared& prepared, size_t call) {
  const float* out = prepared.out.const_data_ptr<float>();
  for (size_t i = 0; i < prepared.expected.size(); ++i) {
    const float got = out[i];
    if (got == prepared.expected[i]) continue;
    Violate(absl::StrCat("rank ", rank.rank, " gets ", got, " instead of ",
                         prepared.expected[i], " from call ", call));
  }
}

absl::Status FinishCall(Rank& rank, Prepared& prepared, size_t call) {
  absl::Status status = rank.group->Wait(*prepared.operation,
                                         /*inputs_free=*/true, rank.deadline);
  if (!status.ok()) return status;
  ExpectReceived(rank, prepared, call);
  // The next call's values take the place of these.
  if (prepared.in.defined()) {
    prepared.in.mutable_data_ptr<float>()[0] = -1;
  }
  return status;
}

absl::Status MakeCalls(Rank& rank, const CollectiveCalls& calls) {
  std::vector<Prepared> prepared;
  for (size_t i = 0; i < calls.calls.size(); ++i) {
    prepared.push_back(
        Prepare(rank, calls.calls[i], calls.memory, static_cast<int>(i)));
    absl::Status status = StartCall(rank, prepared.back());
    if (status.ok() && !calls.in_flight_together) {
      status = FinishCall(rank, prepared.back(), i);
    }
    if (!status.ok()) return status;
  }
  for (size_t i = 0; i < prepared.size() && calls.in_flight_together; ++i) {
    const absl::Status status = FinishCall(rank, prepared[i], i);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Makes a call that has to fail with `code`.
void ExpectFails(Rank& rank, Collective what, absl::StatusCode code) {
  Prepared prepared = Prepare(rank, {what}, Memory::kPrivate, 0);
  absl::Status status = StartCall(rank, prepared);
  if (status.ok()) {
    status = rank.group->Wait(*prepared.operation, /*inputs_free=*/true,
                              rank.deadline);
  }
  if (status.code() == code) return;
  Violate(absl::StrCat("rank ", rank.rank, " is told ", status.ToString()));
}

}  // namespace

MakeScenario Calls(const CollectiveCalls& calls) {
  return OnAllRanks({calls.ranks}, [calls](Rank& rank) {
    const absl::Status status = MakeCalls(rank, calls);
    if (calls.failures == Failures::kNone) ExpectOk(status, rank, "calling");
    if (calls.leave) rank.group->Leave();
  });
}

MakeScenario Mismatch(int ranks) {
  return OnAllRanks({ranks}, [](Rank& rank) {
    // Rank 0 calls something else than the others.
    ExpectFails(
        rank, rank.rank == 0 ? Collective::kAllReduce : Collective::kAllGather,
        absl::StatusCode::kInvalidArgument);
  });
}

MakeScenario RunAhead(int ranks, Collective what) {
  RanksOptions options{ranks};
  const auto post = [what](Rank& rank) {
    Prepared prepared = Prepare(rank, {what}, Memory::kPrivate, 0);
    ExpectOk(StartCall(rank, prepared), rank, "posting");
    return prepared;
  };
  options.before = [post](std::vector<Rank>& all) {
    for (int i = 0; i < comm::SharedRankBlock::kCalls; ++i) post(all.back());
  };
  return OnAllRanks(options, [post](Rank& rank) {
    const Prepared prepared = post(rank);
    if (rank.rank == rank.world_size() - 1) return;
    ExpectOk(rank.group->Wait(*prepared.operation, /*inputs_free=*/false,
                              rank.deadline),
             rank, "waiting");
  });
}

MakeScenario LeaveInstead(int ranks) {
  return OnAllRanks({ranks}, [](Rank& rank) {
    if (rank.rank == rank.world_size() - 1) return rank.group->Leave();
    ExpectFails(rank, Collective::kAllGather, absl::StatusCode::kUnavailable);
  });
}

MakeScenario AbortWhileWaiting() {
  return [] {
    const auto wait = [](Rank& rank) {
      ExpectFails(rank, Collective::kAllGather, absl::StatusCode::kAborted);
    };
    const auto abort = [](Rank& rank) {
      rank.group->Abort(absl::InternalError("why"));
    };
    return MakeRanks({}, {{0, wait}, {0, abort}});
  };
}

MakeScenario FreedMemory(int ranks) {
  return OnAllRanks({ranks}, [](Rank& rank) {
    for (int call = 0; call < 2; ++call) {
      Prepared prepared =
          Prepare(rank, {Collective::kAllGather}, Memory::kSymmetric, call);
      ExpectOk(StartCall(rank, prepared), rank, "calling");
      // The group keeps what it has lent.
      prepared.in.reset();
      ExpectOk(rank.group->Wait(*prepared.operation, /*inputs_free=*/false,
                                rank.deadline),
               rank, "waiting");
      ExpectReceived(rank, prepared, static_cast<size_t>(call));
    }
  });
}

}  // namespace fsdp::interleavings
