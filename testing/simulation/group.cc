#include "testing/simulation/group.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace fsdp::simulation {

using ::fsdp::comm::Call;
using ::fsdp::comm::Collective;

void Network::ProcessDied(int process) {
  for (const std::weak_ptr<Group>& weak : groups) {
    const std::shared_ptr<Group> group = weak.lock();
    if (group == nullptr) continue;
    for (int rank = 0; rank < group->world_size(); ++rank) {
      if (group->processes()[rank] == process) group->Died(rank);
    }
  }
}

Group::Group(Network& network, std::vector<int> processes,
             comm::RankNames names)
    : network_(network),
      processes_(std::move(processes)),
      names_(std::move(names)),
      members_(processes_.size()) {}

std::shared_ptr<Group> Group::Make(Network& network, std::vector<int> processes,
                                   comm::RankNames names) {
  std::shared_ptr<Group> group(
      new Group(network, std::move(processes), std::move(names)));
  network.groups.push_back(group);
  return group;
}

bool Group::IsDead(int rank) const {
  return simulation().IsDead(processes_[rank]);
}

// --- Operations --------------------------------------------------------------

absl::StatusOr<std::shared_ptr<Operation>> Group::Start(
    int rank, const Call& call, comm::ReduceOp op, int root,
    const Buffers& buffers) {
  Member& member = members_[rank];
  const std::string name = comm::Name(call, member.next_sequence);
  simulation().Event(absl::StrCat(name, " begins"));
  if (IsDead(rank)) return absl::AbortedError("this process is dead");
  const int64_t sequence = member.next_sequence++;
  if (member.knows) return Error(rank, name);
  std::shared_ptr<Operation>& operation = operations_[sequence];
  if (operation == nullptr) {
    operation = std::make_shared<Operation>(
        OperationContext{&simulation(), &network_.options, &network_.memories,
                         processes_},
        sequence);
  }
  std::shared_ptr<Operation> mine = operation;
  member.last_call = call;
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::optional<Call>& other = mine->call(peer);
    if (!other.has_value() || *other == call) continue;
    std::vector<std::string> calls;
    for (int any = 0; any < world_size(); ++any) {
      const std::optional<Call>& its = any == rank ? call : mine->call(any);
      calls.push_back(absl::StrCat(names_.Name(any), " called ",
                                   its ? ToString(*its) : "nothing yet"));
    }
    const std::string text =
        absl::StrCat("the ranks' calls #", sequence,
                     " differ: ", absl::StrJoin(calls, "; "));
    Fail({rank, absl::InvalidArgumentError(text), text,
          absl::StatusCode::kInvalidArgument},
         /*at_once=*/true);
    return Error(rank, name);
  }
  std::shared_ptr<Operation> in_front;
  if (buffers.scaled) {
    for (const std::shared_ptr<Operation>& open : Open()) {
      if (open->SumsInto(rank, buffers.out.const_data_ptr())) in_front = open;
    }
  }
  mine->Enter(rank, call, op, root, buffers, std::move(in_front));
  if (mine->all_entered()) operations_.erase(sequence);
  FailOnAbsentees(*mine);
  open_.push_back(mine);
  simulation().Sleep(simulation().RandomDelay(absl::Microseconds(20)));
  return mine;
}

absl::Status Group::Wait(int rank, const std::shared_ptr<Operation>& operation,
                         bool result_only, absl::Time deadline) {
  const std::string name =
      comm::Name(*operation->call(rank), operation->sequence());
  const auto is_over = [&] {
    return result_only ? operation->has_result(rank) : operation->is_done(rank);
  };
  const bool in_time = simulation().Block(
      [&] { return is_over() || members_[rank].knows || IsDead(rank); },
      deadline);
  if (IsDead(rank)) return absl::AbortedError("this process is dead");
  if (is_over()) {
    operation->Acquire(rank);
    simulation().Event(
        absl::StrCat(name, result_only ? " has its result" : " is done"));
    return absl::OkStatus();
  }
  if (!in_time && !members_[rank].knows) {
    std::vector<std::string> missing;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (!operation->call(peer) || operation->is_lost(peer)) {
        missing.push_back(LastSeen(peer));
      }
    }
    return GiveUp(rank, name, missing);
  }
  return Error(rank, name);
}

absl::Status Group::GiveUp(int rank, absl::string_view what,
                           const std::vector<std::string>& missing) {
  const std::string text = absl::StrCat(
      "not done at the deadline; ",
      missing.empty()
          ? "all ranks have called"
          : absl::StrCat("still missing: ", absl::StrJoin(missing, ", ")));
  Fail({rank, absl::DeadlineExceededError(text),
        absl::StrCat(names_.Name(rank), " gave up waiting for ", what, ": ",
                     text),
        absl::StatusCode::kAborted},
       /*at_once=*/false);
  return Error(rank, what);
}

// --- Calls that move nothing -------------------------------------------------

absl::StatusOr<std::shared_ptr<Operation>> Group::Meet(int rank,
                                                       const std::string& label,
                                                       std::string detail) {
  Call call;
  call.collective = Collective::kSplit;
  call.label = label;
  call.detail = std::move(detail);
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Operation> operation,
                        Start(rank, call, comm::ReduceOp::kSum, 0, {}));
  FSDP_RETURN_IF_ERROR(Wait(rank, operation, /*result_only=*/false,
                            simulation().Now() + network_.options.timeout));
  return operation;
}

absl::Status Group::Barrier(int rank, const std::string& label) {
  return Meet(rank, label, "").status();
}

absl::StatusOr<at::Tensor> Group::AllocateCommon(int rank, int64_t bytes) {
  FSDP_ASSIGN_OR_RETURN(
      const std::shared_ptr<Operation> operation,
      Meet(rank, "common memory", absl::StrCat(bytes, " bytes")));
  Meeting& meeting = meetings_[operation->sequence()];
  if (meeting.memories.empty()) {
    meeting.memories = network_.memories.Allocate(
        bytes, processes_, network_.options.late_visibility);
  }
  return meeting.memories[rank];
}

absl::StatusOr<std::pair<std::shared_ptr<Group>, int>> Group::Split(int rank,
                                                                    int color,
                                                                    int key) {
  Meeting& meeting = meetings_[members_[rank].next_sequence];
  meeting.colors.resize(world_size());
  meeting.colors[rank] = {color, key};
  FSDP_RETURN_IF_ERROR(Meet(rank, "the group", "").status());
  if (meeting.seats.empty()) SeatAll(meeting);
  return meeting.seats[rank];
}

void Group::SeatAll(Meeting& meeting) {
  std::map<int, std::vector<int>> ranks_of;  // by color
  for (int rank = 0; rank < world_size(); ++rank) {
    ranks_of[meeting.colors[rank].first].push_back(rank);
  }
  meeting.seats.resize(world_size());
  for (auto& [color, ranks] : ranks_of) {
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      return meeting.colors[a].second < meeting.colors[b].second;
    });
    std::vector<int> processes;
    for (const int rank : ranks) processes.push_back(processes_[rank]);
    const auto group = Make(network_, processes, names_.Part(ranks));
    for (size_t place = 0; place < ranks.size(); ++place) {
      meeting.seats[ranks[place]] = {group, static_cast<int>(place)};
    }
  }
}

// --- Fences ------------------------------------------------------------------

Group::FenceState& Group::FenceOf(int64_t fence) {
  FenceState& state = fences_[fence];
  state.arrivals.resize(world_size());
  state.clocks.resize(world_size());
  return state;
}

void Group::Arrive(int rank, int64_t fence) {
  simulation().Log(absl::StrCat("arrives at fence ", fence));
  if (IsDead(rank)) return;
  FenceState& state = FenceOf(fence);
  ++state.arrivals[rank];
  state.clocks[rank].push_back(network_.memories.Release(processes_[rank]));
}

absl::Status Group::AwaitFence(int rank, int64_t fence, absl::Time deadline) {
  FenceState& state = FenceOf(fence);
  const int64_t mine = state.arrivals[rank];
  const std::string name = absl::StrCat("fence ", fence);
  const auto all_are_there = [&] {
    return std::all_of(state.arrivals.begin(), state.arrivals.end(),
                       [mine](int64_t other) { return other >= mine; });
  };
  simulation().Event(absl::StrCat("waits at ", name));
  const bool in_time = simulation().Block(
      [&] { return all_are_there() || members_[rank].knows || IsDead(rank); },
      deadline);
  if (IsDead(rank)) return absl::AbortedError("this process is dead");
  if (all_are_there()) {
    for (const auto& clocks : state.clocks) {
      if (mine > 0)
        network_.memories.Acquire(processes_[rank], clocks[mine - 1]);
    }
    return absl::OkStatus();
  }
  if (in_time || members_[rank].knows) return Error(rank, name);
  std::vector<std::string> missing;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (state.arrivals[peer] < mine) missing.push_back(LastSeen(peer));
  }
  return GiveUp(rank, name, missing);
}

// --- Failures ----------------------------------------------------------------

void Group::Abort(int rank, const absl::Status& reason) {
  if (IsDead(rank)) return;
  const std::string text =
      absl::StrCat(names_.Name(rank), " aborted: ", reason.message());
  Fail({rank, absl::AbortedError(text), text, absl::StatusCode::kAborted},
       /*at_once=*/false);
}

void Group::Leave(int rank) {
  if (IsDead(rank)) return;
  members_[rank].left = true;
  const auto waiting = operations_;
  for (const auto& [sequence, operation] : waiting) FailOnAbsentees(*operation);
}

void Group::FailOnAbsentees(const Operation& operation) {
  for (int peer = 0; peer < world_size(); ++peer) {
    if (!members_[peer].left || operation.call(peer)) continue;
    const std::string text = absl::StrCat(LastSeen(peer), " is gone");
    Fail({peer, absl::UnavailableError(text), text,
          absl::StatusCode::kUnavailable},
         /*at_once=*/false);
  }
}

void Group::Died(int rank) {
  for (const std::shared_ptr<Operation>& operation : Open()) {
    if (operation->call(rank) && simulation().Chance(500)) {
      operation->Lose(rank);
    }
  }
  if (!network_.options.notices_deaths) return;
  const std::weak_ptr<Group> weak = weak_from_this();
  simulation().After(simulation().RandomDelay(absl::Seconds(2)), [weak, rank] {
    const std::shared_ptr<Group> group = weak.lock();
    if (group == nullptr) return;
    const std::string text = absl::StrCat(group->LastSeen(rank), " is gone");
    group->Fail({rank, absl::UnavailableError(text), text,
                 absl::StatusCode::kUnavailable},
                /*at_once=*/false);
  });
}

void Group::Fail(Failure failure, bool at_once) {
  if (failure_) {
    // Another failure was first; who gives up now takes no further part.
    Learn(failure.rank);
    return;
  }
  failure_ = std::move(failure);
  simulation().Log(absl::StrCat("the group fails: ", failure_->text));
  const std::weak_ptr<Group> weak = weak_from_this();
  for (int rank = 0; rank < world_size(); ++rank) {
    if (at_once || rank == failure_->rank) {
      Learn(rank);
      continue;
    }
    simulation().After(simulation().RandomDelay(absl::Milliseconds(200)),
                       [weak, rank] {
                         if (const auto group = weak.lock()) group->Learn(rank);
                       });
  }
}

void Group::Learn(int rank) {
  members_[rank].knows = true;
  for (const std::shared_ptr<Operation>& operation : Open()) {
    if (!operation->is_done(rank)) operation->Cancel(rank);
  }
}

std::vector<std::shared_ptr<Operation>> Group::Open() {
  std::vector<std::shared_ptr<Operation>> open;
  for (const std::weak_ptr<Operation>& weak : open_) {
    if (std::shared_ptr<Operation> operation = weak.lock()) {
      if (open.empty() || open.back() != operation) open.push_back(operation);
    }
  }
  open_.assign(open.begin(), open.end());
  return open;
}

std::string Group::LastSeen(int rank) const {
  const Member& member = members_[rank];
  if (!member.last_call)
    return absl::StrCat(names_.Name(rank), " (no call so far)");
  return absl::StrCat(names_.Name(rank), " (last seen in ",
                      comm::Name(*member.last_call, member.next_sequence - 1),
                      ")");
}

absl::Status Group::Error(int rank, absl::string_view what) const {
  const bool own = failure_->rank == rank;
  return absl::Status(own ? failure_->own.code() : failure_->code_of_others,
                      absl::StrCat(what, " on ", names_.Place(rank), ": ",
                                   own ? std::string(failure_->own.message())
                                       : failure_->text));
}

}  // namespace fsdp::simulation
