#include "comm/testing/run_ranks.h"

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/connect_ranks.h"

namespace fsdp::comm::testing {

namespace {

// Ranks would wait for one another if each computed on all cores. What they are
// compared with has to sum as they do.
const bool kIsOneThread = [] {
  at::set_num_threads(1);
  return true;
}();

struct RankThread {
  std::thread thread;
  absl::Status result;
  absl::Notification ended;
};

void RunRank(Communicator& communicator, size_t rank, const RankFunction& fn,
             RankThread& mine) {
  const absl::Status thrown = TorchToStatus(
      absl::StrCat("rank ", rank), [&] { mine.result = fn(communicator); });
  if (!thrown.ok()) mine.result = thrown;
  if (!mine.result.ok()) communicator.Abort(mine.result);
  mine.ended.Notify();
}

bool AwaitAll(const std::vector<RankThread>& ranks, absl::Duration limit) {
  const absl::Time deadline = absl::Now() + limit;
  return absl::c_all_of(ranks, [deadline](const RankThread& rank) {
    return rank.ended.WaitForNotificationWithDeadline(deadline);
  });
}

// The threads hold references to the caller's stack, so nothing can go on.
[[noreturn]] void StopProgram(const std::vector<RankThread>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].ended.HasBeenNotified()) continue;
    std::fprintf(stderr, "rank %zu still runs after its group was aborted\n",
                 rank);
  }
  std::abort();
}

}  // namespace

std::vector<absl::Status> RunRanks(
    absl::Span<const std::unique_ptr<Communicator>> communicators,
    const RankFunction& fn, absl::Duration limit) {
  std::vector<RankThread> ranks(communicators.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].thread =
        std::thread(RunRank, std::ref(*communicators[rank]), rank,
                    std::cref(fn), std::ref(ranks[rank]));
  }
  if (!AwaitAll(ranks, limit)) {
    for (const auto& communicator : communicators) {
      communicator->Abort(absl::DeadlineExceededError(
          absl::StrCat("RunRanks: the ranks did not end within ",
                       absl::FormatDuration(limit))));
    }
    if (!AwaitAll(ranks, absl::Seconds(20))) StopProgram(ranks);
  }
  std::vector<absl::Status> results;
  results.reserve(ranks.size());
  for (RankThread& rank : ranks) {
    rank.thread.join();
    results.push_back(std::move(rank.result));
  }
  return results;
}

std::vector<absl::Status> RunRanks(int world_size, const RankFunction& fn,
                                   absl::Duration limit) {
  auto communicators = std::getenv("RUN_RANKS_SHARING_MEMORY") == nullptr
                           ? CreateLocalGroup(world_size)
                           : CreateSharedMemoryGroup(world_size);
  FSDP_CHECK(communicators.ok());
  return RunRanks(*communicators, fn, limit);
}

absl::Status AllOk(absl::Span<const absl::Status> statuses) {
  // Ranks say this that have only seen another one leave.
  const auto is_echo = [](const absl::Status& status) {
    return absl::IsAborted(status) || absl::IsUnavailable(status);
  };
  absl::Status first;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    if (statuses[rank].ok()) continue;
    if (!first.ok() && is_echo(statuses[rank])) continue;
    if (first.ok() || is_echo(first)) {
      first = Annotate(statuses[rank], absl::StrCat("rank ", rank));
    }
  }
  return first;
}

absl::Status RunAllRanks(int world_size, const RankFunction& fn) {
  return AllOk(RunRanks(world_size, fn));
}

absl::Status Finish(StartedWork work) {
  FSDP_RETURN_IF_ERROR(work.status());
  return (*work)->Wait(absl::Now() + absl::Seconds(30));
}

std::vector<absl::Status> RunRefusedRanks(int world_size,
                                          const RankFunction& fn) {
  std::vector<absl::Status> refusals(world_size);
  const absl::Status ended =
      RunAllRanks(world_size, [&](Communicator& communicator) {
        absl::Status refusal;
        const absl::Status thrown =
            TorchToStatus("a rank", [&] { refusal = fn(communicator); });
        refusals[communicator.rank()] = thrown.ok() ? refusal : thrown;
        return absl::OkStatus();
      });
  FSDP_CHECK(ended.ok());
  return refusals;
}

}  // namespace fsdp::comm::testing
