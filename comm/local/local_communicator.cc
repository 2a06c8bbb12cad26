#include "comm/local/local_communicator.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/reduction/reduction.h"
#include "comm/split_members.h"

namespace fsdp::comm {
namespace {

struct Seat;

// The arguments of one rank's call. Those of a device have no tensors here.
struct Payload {
  CollectiveArgs args;
  SplitRequest split = {};
  std::shared_ptr<Seat> seat = {};  // where the rank finds it after a split
};

// Moves the data of all ranks. `names` are those of the group.
void Move(absl::Span<const Payload> payloads, const RankNames& names);

// The k-th calls of all ranks are one operation. Entering never blocks: the
// last rank to enter an operation moves the data of all. The first failure
// (calls that differ, a missed deadline, Abort(), a rank that has left) ends
// the whole group: every unfinished and later operation fails with it.
// Thread-safe; the caller orders the calls of one rank.
class Rendezvous {
 public:
  // One operation, which the ranks that have entered it share. Guarded by
  // mutex_. But the last rank to enter reads `payloads` without it: nobody else
  // touches them once all have entered.
  struct Operation {
    Operation(int64_t sequence, int world_size)
        : sequence(sequence), calls(world_size), payloads(world_size) {}

    const int64_t sequence;
    std::vector<std::optional<Call>> calls;  // by rank
    std::vector<Payload> payloads;           // by rank
    int num_entered = 0;
    bool running = false;  // all have entered
    bool done = false;     // succeeded or failed
    bool failed = false;
  };

  // Errors give the ranks these names.
  explicit Rendezvous(RankNames names)
      : names_(std::move(names)),
        next_sequence_(world_size(), 0),
        last_call_(world_size()),
        left_(world_size(), false) {}

  int world_size() const { return names_.size(); }
  const RankNames& names() const { return names_; }

  // Enters the next operation of `rank`. All ranks have to pass an equal
  // `call`. The last rank to enter moves the data in its thread, before Enter()
  // returns. `payload` is destroyed as soon as the operation is done or has
  // failed. If the group has failed, the call fails at once, with the errors of
  // Wait().
  absl::StatusOr<std::shared_ptr<Operation>> Enter(int rank, const Call& call,
                                                   Payload payload) {
    FSDP_CHECK(rank >= 0 && rank < world_size());
    std::shared_ptr<Operation> operation;
    {
      absl::MutexLock lock(&mutex_);
      const int64_t sequence = next_sequence_[rank]++;
      if (failure_) return ErrorLocked(rank, call, sequence);
      std::shared_ptr<Operation>& open = open_[sequence];
      if (open == nullptr) {
        open = std::make_shared<Operation>(sequence, world_size());
      }
      operation = open;
      last_call_[rank] = LastCall{call, sequence};
      operation->calls[rank] = call;
      operation->payloads[rank] = std::move(payload);
      ++operation->num_entered;
      FailOnMismatchLocked(rank, *operation);
      FailOnAbsenteesLocked(*operation);
      if (failure_) return ErrorLocked(rank, call, sequence);
      if (operation->num_entered < world_size()) return operation;
      operation->running = true;
      open_.erase(sequence);
    }
    Move(operation->payloads, names_);
    // Comes before anyone is told, since waiters then use the buffers again.
    operation->payloads.clear();
    absl::MutexLock lock(&mutex_);
    operation->done = true;
    return operation;
  }

  // Blocks until `operation`, which `rank` has entered, is done. Returns the
  // errors of Work::Wait(); a missed deadline fails the group. Data that
  // is already being moved is waited for even past the deadline, because it
  // goes into the caller's buffers.
  absl::Status Wait(int rank, const std::shared_ptr<Operation>& operation,
                    absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    const absl::Condition is_done(&operation->done);
    if (!mutex_.AwaitWithDeadline(is_done, deadline)) {
      if (operation->running) {
        mutex_.Await(is_done);
      } else {
        std::vector<std::string> missing;
        for (int peer = 0; peer < world_size(); ++peer) {
          if (!operation->calls[peer]) missing.push_back(LastSeenLocked(peer));
        }
        const std::string text =
            absl::StrCat("not done at the deadline; still missing: ",
                         absl::StrJoin(missing, ", "));
        const std::string name =
            Name(*operation->calls[rank], operation->sequence);
        FailLocked({rank, absl::DeadlineExceededError(text),
                    absl::StrCat(names_.Name(rank), " gave up waiting for ",
                                 name, ": ", text),
                    absl::StatusCode::kAborted});
      }
    }
    if (!operation->failed) return absl::OkStatus();
    return ErrorLocked(rank, *operation->calls[rank], operation->sequence);
  }

  // Fails the group on behalf of `rank`; later calls do nothing.
  void Abort(int rank, const absl::Status& reason) {
    const std::string text =
        absl::StrCat(names_.Name(rank), " aborted: ", reason.message());
    absl::MutexLock lock(&mutex_);
    FailLocked(
        {rank, absl::AbortedError(text), text, absl::StatusCode::kAborted});
  }

  // Says that `rank` makes no more calls. Operations that it has entered stay
  // valid, all others fail.
  void Leave(int rank) {
    absl::MutexLock lock(&mutex_);
    left_[rank] = true;
    // This is a copy, since FailLocked() empties `open_`.
    const auto open = open_;
    for (const auto& [sequence, operation] : open) {
      FailOnAbsenteesLocked(*operation);
    }
  }

 private:
  struct LastCall {
    Call call;
    int64_t sequence;
  };
  struct Failure {
    int rank;             // the one that failed the group
    absl::Status status;  // of that rank's own operations
    std::string text;     // for the others
    absl::StatusCode code_of_others;
  };

  void FailOnMismatchLocked(int rank, const Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto differs = [&](const std::optional<Call>& call) {
      return call && !(*call == *operation.calls[rank]);
    };
    if (absl::c_none_of(operation.calls, differs)) return;
    std::vector<std::string> calls;
    for (int peer = 0; peer < world_size(); ++peer) {
      const std::optional<Call>& call = operation.calls[peer];
      calls.push_back(absl::StrCat(names_.Name(peer), " called ",
                                   call ? ToString(*call) : "nothing yet"));
    }
    const std::string text =
        absl::StrCat("the ranks' calls #", operation.sequence,
                     " differ: ", absl::StrJoin(calls, "; "));
    FailLocked({rank, absl::InvalidArgumentError(text), text,
                absl::StatusCode::kInvalidArgument});
  }

  void FailOnAbsenteesLocked(const Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (!left_[peer] || operation.calls[peer]) continue;
      const std::string text = absl::StrCat(
          LastSeenLocked(peer),
          " has left the group: its function has returned, or its communicator "
          "was destroyed");
      FailLocked({peer, absl::UnavailableError(text), text,
                  absl::StatusCode::kUnavailable});
    }
  }

  void FailLocked(Failure failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (failure_) return;
    failure_ = std::move(failure);
    for (auto& [sequence, operation] : open_) {
      operation->failed = true;
      operation->done = true;
      operation->payloads.clear();
    }
    open_.clear();
  }

  std::string LastSeenLocked(int rank) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::optional<LastCall>& last = last_call_[rank];
    if (!last) return absl::StrCat(names_.Name(rank), " (no call so far)");
    return absl::StrCat(names_.Name(rank), " (last seen in ",
                        Name(last->call, last->sequence), ")");
  }

  absl::Status ErrorLocked(int rank, const Call& call, int64_t sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const bool own = failure_->rank == rank;
    const absl::StatusCode code =
        own ? failure_->status.code() : failure_->code_of_others;
    const absl::string_view text =
        own ? failure_->status.message() : failure_->text;
    return absl::Status(code, absl::StrCat(Name(call, sequence), " on ",
                                           names_.Place(rank), ": ", text));
  }

  const RankNames names_;
  absl::Mutex mutex_;
  // These three are by rank.
  std::vector<int64_t> next_sequence_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<LastCall>> last_call_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> left_ ABSL_GUARDED_BY(mutex_);
  // Operations that not all ranks have entered, by sequence number.
  std::map<int64_t, std::shared_ptr<Operation>> open_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);
};

using Payloads = absl::Span<const Payload>;

char* Data(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

void Copy(void* to, const void* from, size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

void MoveAllGather(Payloads payloads) {
  for (const Payload& payload : payloads) {
    char* slice = Data(payload.args.out);
    for (const Payload& source : payloads) {
      const at::Tensor& in = source.args.in;
      Copy(slice, Data(in), in.nbytes());
      slice += in.nbytes();
    }
  }
}

void MoveReduceScatter(Payloads payloads, ReduceOp op) {
  std::vector<const void*> slices(payloads.size());
  for (size_t rank = 0; rank < payloads.size(); ++rank) {
    const at::Tensor& out = payloads[rank].args.out;
    for (size_t peer = 0; peer < payloads.size(); ++peer) {
      slices[peer] = Data(payloads[peer].args.in) + rank * out.nbytes();
    }
    Reduce(out.scalar_type(), op, slices, out.numel(), Data(out));
  }
}

void MoveAllToAll(Payloads payloads) {
  for (size_t rank = 0; rank < payloads.size(); ++rank) {
    const at::Tensor& out = payloads[rank].args.out;
    const size_t bytes = out.nbytes() / payloads.size();
    for (size_t peer = 0; peer < payloads.size(); ++peer) {
      Copy(Data(out) + peer * bytes,
           Data(payloads[peer].args.in) + rank * bytes, bytes);
    }
  }
}

void MoveAllReduce(Payloads payloads, ReduceOp op) {
  std::vector<const void*> inputs;
  for (const Payload& payload : payloads) {
    inputs.push_back(Data(payload.args.out));
  }
  const at::Tensor& result = payloads[0].args.out;
  Reduce(result.scalar_type(), op, inputs, result.numel(), Data(result));
  for (const Payload& payload : payloads.subspan(1)) {
    Copy(Data(payload.args.out), Data(result), result.nbytes());
  }
}

void MoveBroadcast(Payloads payloads, int root) {
  const at::Tensor& source = payloads[root].args.out;
  for (const Payload& payload : payloads) {
    Copy(Data(payload.args.out), Data(source), source.nbytes());
  }
}

struct Seat {
  std::shared_ptr<Rendezvous> group;
  int rank = 0;
};

void AssignSeats(Payloads payloads, const RankNames& names) {
  std::vector<SplitRequest> requests;
  requests.reserve(payloads.size());
  for (const Payload& payload : payloads) requests.push_back(payload.split);
  for (const auto& [color, members] : MembersByColor(requests)) {
    const auto group = std::make_shared<Rendezvous>(names.Part(members));
    for (size_t rank = 0; rank < members.size(); ++rank) {
      *payloads[members[rank]].seat = {group, static_cast<int>(rank)};
    }
  }
}

void Move(Payloads payloads, const RankNames& names) {
  const CollectiveArgs& args = payloads[0].args;
  if (!args.out.defined() && args.collective != Collective::kSplit) return;
  switch (args.collective) {
    case Collective::kAllGather:
      return MoveAllGather(payloads);
    case Collective::kReduceScatter:
      return MoveReduceScatter(payloads, args.op);
    case Collective::kAllToAll:
      return MoveAllToAll(payloads);
    case Collective::kAllReduce:
      return MoveAllReduce(payloads, args.op);
    case Collective::kBroadcast:
      return MoveBroadcast(payloads, args.root);
    case Collective::kSplit:
      return AssignSeats(payloads, names);
  }
}

class LocalWork final : public Work {
 public:
  LocalWork(Seat seat, std::shared_ptr<Rendezvous::Operation> operation,
            absl::Duration timeout)
      : seat_(std::move(seat)),
        operation_(std::move(operation)),
        timeout_(timeout) {}

  absl::Status Wait(absl::Time deadline) override {
    return seat_.group->Wait(seat_.rank, operation_, deadline);
  }

  absl::Status BlockCurrentStream() override {
    return Wait(absl::Now() + timeout_);
  }

 private:
  const Seat seat_;
  const std::shared_ptr<Rendezvous::Operation> operation_;
  const absl::Duration timeout_;
};

// A copy on a device, for the only rank of a group.
class CopyWork final : public Work {
 public:
  CopyWork(Seat seat, std::string what, const CollectiveArgs& args)
      : seat_(std::move(seat)),
        what_(std::move(what)),
        out_(args.out),
        in_(args.in) {}
  // What is freed from now on is used by the current stream after the copy.
  ~CopyWork() override { BlockCurrentStream().IgnoreError(); }

  absl::Status Start() {
    return TorchToStatus(what_, [this] {
      const c10::NoGradGuard no_grad;
      if (in_.defined() && out_.numel() > 0 &&
          out_.data_ptr() != in_.data_ptr()) {
        out_.view(-1).copy_(in_.view(-1), /*non_blocking=*/true);
      }
      end_.Record(out_.device());
    });
  }

  absl::Status Wait(absl::Time deadline) override {
    bool done = false;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(what_, [&] { done = end_.Wait(deadline); }));
    if (done) return absl::OkStatus();
    absl::Status late = absl::DeadlineExceededError(
        absl::StrCat(what_, ": its stream has not done it at the deadline"));
    seat_.group->Abort(seat_.rank, late);
    return late;
  }

  absl::Status BlockCurrentStream() override {
    return TorchToStatus(what_, [this] { end_.BlockCurrentStream(); });
  }

 private:
  const Seat seat_;
  const std::string what_;
  const at::Tensor out_;
  const at::Tensor in_;  // undefined if `out_` is both
  DeviceEvent end_;
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(Seat seat, absl::Duration timeout, c10::Device device)
      : seat_(std::move(seat)), timeout_(timeout), device_(device) {}
  ~LocalCommunicator() override {
    if (unwinds()) seat_.group->Abort(seat_.rank, EndedByException());
    seat_.group->Leave(seat_.rank);
  }

  int rank() const override { return seat_.rank; }
  int world_size() const override { return seat_.group->world_size(); }
  const RankNames& names() const override { return seat_.group->names(); }
  absl::Duration default_timeout() const override { return timeout_; }
  std::string ToString() const override {
    return absl::StrCat("local, ", Place());
  }

  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    return AllocatePlain(bytes, device_);
  }

  CreatedCommunicator Split(int color, int key) override {
    FSDP_RETURN_IF_ERROR(CheckColor(color));
    Payload payload{{Collective::kSplit, {}}, {color, key}};
    const auto seat = payload.seat = std::make_shared<Seat>();
    const Call call{Collective::kSplit, "the group", "", 0, ""};
    FSDP_ASSIGN_OR_RETURN(
        auto operation,
        seat_.group->Enter(seat_.rank, call, std::move(payload)));
    FSDP_RETURN_IF_ERROR(
        seat_.group->Wait(seat_.rank, operation, absl::Now() + timeout_));
    return std::make_unique<LocalCommunicator>(*seat, timeout_, device_);
  }

  void Abort(const absl::Status& reason) override {
    seat_.group->Abort(seat_.rank, reason);
  }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    const Call call =
        CallOf(args.collective, label, args.counted(), args.detail());
    if (args.out.device() != device_) {
      return absl::UnimplementedError(absl::StrCat(
          comm::ToString(call), " on ", Place(), ": local groups take ",
          device_.is_cpu() ? "CPU" : device_.str(), " tensors, not ",
          args.out.device().str()));
    }
    if (device_.is_cpu()) {
      FSDP_ASSIGN_OR_RETURN(
          auto operation, seat_.group->Enter(seat_.rank, call, Payload{args}));
      return std::make_unique<LocalWork>(seat_, std::move(operation), timeout_);
    }
    // Fails where the group has failed.
    FSDP_RETURN_IF_ERROR(
        seat_.group->Enter(seat_.rank, call, Payload{{args.collective, {}}})
            .status());
    auto work = std::make_unique<CopyWork>(
        seat_, absl::StrCat(comm::ToString(call), " on ", Place()), args);
    FSDP_RETURN_IF_ERROR(work->Start());
    return work;
  }

 private:
  const Seat seat_;
  const absl::Duration timeout_;
  const c10::Device device_;
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateLocalGroup(
    int world_size, const LocalGroupOptions& options) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a local group of ", world_size, " ranks"));
  }
  if (world_size > 1 && !options.device.is_cpu()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a local group of ", world_size, " ranks on ",
                     options.device.str(), ", which only one rank may have"));
  }
  FSDP_ASSIGN_OR_RETURN(RankNames names,
                        RankNames::Of(world_size, options.world_ranks));
  const auto group = std::make_shared<Rendezvous>(std::move(names));
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    communicators.push_back(std::make_unique<LocalCommunicator>(
        Seat{group, rank}, options.timeout, options.device));
  }
  return communicators;
}

}  // namespace fsdp::comm
