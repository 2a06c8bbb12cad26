#include "checkpoint/save/rounds.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/run/run_values.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kLabel[] = "progress of a save";

// What a rank says in a round.
struct State {
  int64_t ended = 0;
  int64_t bytes = 0;
  int64_t all_bytes = 0;
  int64_t stalled_ms = 0;  // since a call came back
};
constexpr int64_t kNumbers = sizeof(State) / sizeof(int64_t);

class Rounds {
 public:
  Rounds(comm::Communicator& ranks, const RoundOptions& options,
         const DiskProgress& progress)
      : ranks_(ranks), options_(options), progress_(progress) {}

  // This rank's `act` has returned.
  void End() { ended_.Notify(); }

  // Until all have ended, or one is given up.
  absl::Status Run() {
    absl::Status status =
        TorchToStatus(kLabel, [this] { return RunOrThrow(); });
    if (!status.ok() && options_.on_error != nullptr) options_.on_error(status);
    return status;
  }

 private:
  absl::Status RunOrThrow() {
    while (true) {
      ended_.WaitForNotificationWithTimeout(options_.interval);
      FSDP_ASSIGN_OR_RETURN(const std::vector<State> states,
                            Exchange(MyState()));
      FSDP_RETURN_IF_ERROR(CheckStalls(states));
      const bool all_ended =
          std::all_of(states.begin(), states.end(),
                      [](const State& state) { return state.ended != 0; });
      if (all_ended) return absl::OkStatus();
    }
  }

  State MyState() {
    const absl::Time now = absl::Now();
    const int64_t calls = progress_.calls();
    if (calls != calls_) {
      calls_ = calls;
      since_ = now;
    }
    State state;
    state.ended = ended_.HasBeenNotified() ? 1 : 0;
    state.bytes = progress_.bytes();
    state.all_bytes = options_.all_bytes;
    if (state.ended == 0) {
      state.stalled_ms = absl::ToInt64Milliseconds(now - since_);
    }
    return state;
  }

  absl::StatusOr<std::vector<State>> Exchange(const State& mine) {
    const at::Tensor in = at::empty({kNumbers}, at::kLong);
    const at::Tensor out =
        at::empty({kNumbers * ranks_.world_size()}, at::kLong);
    std::memcpy(in.mutable_data_ptr<int64_t>(), &mine, sizeof(mine));
    FSDP_ASSIGN_OR_RETURN(const auto work, ranks_.AllGather(out, in, kLabel));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + options_.timeout));
    std::vector<State> states(ranks_.world_size());
    static_assert(std::is_trivially_copyable_v<State>);
    std::memcpy(static_cast<void*>(states.data()),
                out.const_data_ptr<int64_t>(), states.size() * sizeof(State));
    return states;
  }

  // All ranks see the same.
  absl::Status CheckStalls(const std::vector<State>& states) const {
    const int64_t limit = absl::ToInt64Milliseconds(options_.stall_timeout);
    for (size_t rank = 0; rank < states.size(); ++rank) {
      const State& state = states[rank];
      if (state.stalled_ms <= limit) continue;
      return absl::DeadlineExceededError(absl::StrCat(
          options_.what, ": rank ", rank, " has waited for its disk for ",
          absl::FormatDuration(absl::Milliseconds(state.stalled_ms)),
          ", where ", state.bytes, " of ", state.all_bytes,
          " bytes are written; the save is given up; see what that disk does, "
          "or raise CheckpointerOptions::stall_timeout"));
    }
    return absl::OkStatus();
  }

  comm::Communicator& ranks_;
  const RoundOptions& options_;
  const DiskProgress& progress_;
  absl::Notification ended_;
  int64_t calls_ = 0;
  absl::Time since_ = absl::Now();  // calls_ are as many as they are
};

}  // namespace

absl::Status ActInRounds(comm::Communicator& ranks, const RoundOptions& options,
                         const DiskProgress& progress,
                         absl::FunctionRef<void()> act) {
  Rounds rounds(ranks, options, progress);
  absl::Status status;
  absl::StatusOr<std::thread> thread = StartThread(
      "to tell other ranks how far a save is", [&] { status = rounds.Run(); });
  act();
  rounds.End();
  if (thread.ok()) {
    thread->join();
  } else {
    // The others have waited for a first word.
    status = rounds.Run();
  }
  return status;
}

}  // namespace fsdp::checkpoint
