#include "comm/testing/run_ranks.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/connect_ranks.h"

namespace fsdp::comm::testing {

namespace {

// The results of the ranks' threads.
struct Progress {
  explicit Progress(size_t num_ranks)
      : results(num_ranks), num_running(num_ranks), running(num_ranks, true) {}

  absl::Mutex mutex;
  std::vector<absl::Status> results ABSL_GUARDED_BY(mutex);
  size_t num_running ABSL_GUARDED_BY(mutex);
  std::vector<bool> running ABSL_GUARDED_BY(mutex);
};

void RunRank(Communicator& communicator, size_t rank, const RankFunction& fn,
             Progress* progress) {
  absl::Status result;
  const absl::Status thrown = TorchToStatus(absl::StrCat("rank ", rank),
                                            [&] { result = fn(communicator); });
  if (!thrown.ok()) result = thrown;
  if (!result.ok()) communicator.Abort(result);
  absl::MutexLock lock(&progress->mutex);
  progress->results[rank] = result;
  progress->running[rank] = false;
  --progress->num_running;
}

bool AwaitAll(Progress* progress, absl::Duration limit) {
  const auto all_ended = [progress]() { return progress->num_running == 0; };
  absl::MutexLock lock(&progress->mutex);
  return progress->mutex.AwaitWithTimeout(absl::Condition(&all_ended), limit);
}

// The threads hold references to the caller's stack, so nothing can go on.
[[noreturn]] void StopProgram(Progress* progress) {
  absl::MutexLock lock(&progress->mutex);
  for (size_t rank = 0; rank < progress->running.size(); ++rank) {
    if (!progress->running[rank]) continue;
    std::fprintf(stderr, "rank %zu still runs after its group was aborted\n",
                 rank);
  }
  std::abort();
}

}  // namespace

std::vector<absl::Status> RunRanks(
    absl::Span<const std::unique_ptr<Communicator>> communicators,
    const RankFunction& fn, absl::Duration limit) {
  Progress progress(communicators.size());
  std::vector<std::thread> threads;
  threads.reserve(communicators.size());
  for (size_t rank = 0; rank < communicators.size(); ++rank) {
    threads.emplace_back(RunRank, std::ref(*communicators[rank]), rank,
                         std::cref(fn), &progress);
  }
  if (!AwaitAll(&progress, limit)) {
    for (const auto& communicator : communicators) {
      communicator->Abort(absl::DeadlineExceededError(
          absl::StrCat("RunRanks: the ranks did not end within ",
                       absl::FormatDuration(limit))));
    }
    if (!AwaitAll(&progress, absl::Seconds(20))) StopProgram(&progress);
  }
  for (std::thread& thread : threads) thread.join();
  absl::MutexLock lock(&progress.mutex);
  return progress.results;
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
