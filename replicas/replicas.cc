#include "replicas/replicas.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "checkpoint/run/run_values.h"
#include "comm/communicator.h"
#include "replicas/column.h"
#include "replicas/joined_replica.h"
#include "replicas/live_log.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"
#include "replicas/store_registers.h"

namespace fsdp {
namespace {

// All keys of a run begin with it.
constexpr char kPrefix[] = "replicas";

// Beats, and looks at those of others, within loss_timeout.
constexpr int kBeats = 20;
constexpr absl::Duration kShortestBeat = absl::Milliseconds(20);
constexpr absl::Duration kLongestBeat = absl::Milliseconds(200);

// Keys of the groups of so many epochs stay in the keeper: some rank may be
// about to leave these groups.
constexpr int64_t kKeptEpochs = 4;

constexpr absl::Duration kLongestReplay = absl::Hours(24 * 365);
// This key in the keeper says why a replay cannot go on.
constexpr char kReplayFailed[] = "replay/failed";

absl::Status Check(const comm::Environment& environment,
                   const checkpoint::TrainingRun* run,
                   const ReplicaOptions& options) {
  const auto refuse = [](const auto&... text) {
    return absl::InvalidArgumentError(
        absl::StrCat("Replicas::Join(): ", text...));
  };
  if (run == nullptr || run->model == nullptr) {
    return refuse("the run has no model: set TrainingRun::model");
  }
  if (run->optimizer == nullptr) {
    return refuse("the run has no optimizer: set TrainingRun::optimizer");
  }
  if (options.steps < 0 || options.first_step < 0) {
    return refuse("steps (", options.steps, ") and first_step (",
                  options.first_step, ") cannot be negative");
  }
  if (options.loss_timeout < absl::Milliseconds(100)) {
    return refuse("loss_timeout is ",
                  absl::FormatDuration(options.loss_timeout),
                  ": a busy rank is silent for longer than 100 ms");
  }
  const comm::Communicator* const inside = checkpoint::RanksOf(*run->model);
  const int ranks = inside == nullptr ? 1 : inside->world_size();
  if (ranks == environment.world_size) return absl::OkStatus();
  return refuse("the model is sharded over ", ranks,
                " ranks, but a replica has ", environment.world_size,
                ": shard it over all ranks of its replica");
}

// Refuses calls in the wrong order and calls after an error.
class ReplicasOfRun final : public Replicas {
 public:
  ReplicasOfRun(const comm::Environment& environment,
                const ReplicaOptions& options, checkpoint::TrainingRun& run)
      : environment_(environment),
        options_(options),
        run_(run),
        self_{environment.replica, environment.replica_incarnation},
        steps_done_(options.first_step),
        column_(KeeperFor(environment), ColumnOptions()) {}

  // To be called unless the run has no other replicas.
  absl::Status Start() {
    FSDP_ASSIGN_OR_RETURN(log_, StartLog());
    replicas::JoinedReplicaOptions joined;
    joined.self = self_;
    joined.rank = environment_.rank;
    joined.steps = options_.steps;
    joined.first_step = options_.first_step;
    joined.timeout = options_.between.timeout;
    joined.patience = Patience();
    joined.stop_requested = StopRequested();
    replica_.emplace(joined, *log_, column_, run_);
    return absl::OkStatus();
  }

  absl::StatusOr<std::optional<Step>> BeginStep() override {
    FSDP_RETURN_IF_ERROR(failure_);
    if (in_step_) {
      return absl::FailedPreconditionError(
          "BeginStep(): the step before is not finished: call FinishStep() "
          "after backward");
    }
    absl::StatusOr<std::optional<Step>> step = Begin();
    failure_ = step.status();
    in_step_ = step.ok() && step->has_value();
    if (in_step_) steps_done_ = (*step)->step;
    return step;
  }

  absl::Status FinishStep() override {
    FSDP_RETURN_IF_ERROR(failure_);
    if (!in_step_) {
      return absl::FailedPreconditionError(
          "FinishStep(): no step has begun: call BeginStep() first");
    }
    if (replica_.has_value()) failure_ = EndReplay(replica_->FinishStep());
    in_step_ = false;
    if (failure_.ok()) ++steps_done_;
    return failure_;
  }

  int64_t steps_done() const override { return steps_done_; }

  std::string Members() const override {
    if (!replica_.has_value()) return "0.0";
    return absl::StrJoin(replica_->finished().members, " ",
                         [](std::string* text, const replicas::Member& member) {
                           absl::StrAppend(text, ToString(member.id));
                         });
  }

 private:
  // Time for noticing a silence and for making an entry.
  absl::Duration Patience() const {
    return 2 * options_.loss_timeout + absl::Seconds(10);
  }

  static comm::Environment KeeperFor(const comm::Environment& environment) {
    comm::Environment keeper = environment;
    keeper.master_addr = environment.keeper_addr;
    keeper.master_port = environment.keeper_port;
    keeper.kept_store = true;
    keeper.kept_store_prefix =
        absl::StrCat(kPrefix, "/column/", environment.rank);
    keeper.listen_fd = -1;
    return keeper;
  }

  comm::ConnectOptions ColumnOptions() const {
    comm::ConnectOptions column = options_.between;
    column.stop_requested = StopRequested();
    // A replica that comes back waits for the others to get that far.
    if (!options_.replay.empty()) column.connect_timeout = kLongestReplay;
    return column;
  }

  // Returns whether a rank is to give up waiting.
  std::function<bool()> StopRequested() const {
    if (options_.replay.empty()) return options_.between.stop_requested;
    return [this] {
      const auto& stop_requested = options_.between.stop_requested;
      return (stop_requested && stop_requested()) ||
             registers_->HasAll({kReplayFailed}).value_or(false);
    };
  }

  // Makes a replay that has failed fail in all replicas: others may wait for a
  // life of this replica that does not come.
  absl::Status EndReplay(const absl::Status& status) {
    if (status.ok() || replay_ == nullptr || replay_->ends_as_recorded()) {
      return status;
    }
    const std::string mine =
        absl::StrCat("replica ", ToString(self_), ": ", status.message());
    const auto first =
        registers_->CompareAndSet(kReplayFailed, /*expected=*/"", mine);
    const bool is_told = first.ok() && *first != mine;
    if (!is_told || !absl::IsCancelled(status)) return status;
    return absl::InvalidArgumentError(
        absl::StrCat("this replay has failed: ", *first));
  }

  absl::StatusOr<std::unique_ptr<replicas::StepLog>> StartLog() {
    FSDP_ASSIGN_OR_RETURN(
        auto registers, replicas::StoreRegisters::Connect(
                            {environment_.keeper_addr, environment_.keeper_port,
                             environment_.secret},
                            kPrefix,
                            {absl::Now() + options_.between.connect_timeout,
                             options_.between.stop_requested}));
    if (!options_.replay.empty()) {
      registers_ = std::move(registers);
      FSDP_ASSIGN_OR_RETURN(replicas::History history,
                            replicas::ReadHistory(options_.replay));
      auto replay = std::make_unique<replicas::ReplayLog>(
          std::move(history), self_, options_.steps);
      replay_ = replay.get();
      return replay;
    }
    replicas::LiveLogOptions log;
    log.membership.self = self_;
    log.membership.rank = environment_.rank;
    log.membership.ranks_per_replica = environment_.world_size;
    log.membership.replicas = environment_.replicas;
    log.membership.steps = options_.steps;
    log.membership.found_timeout = options_.found_timeout;
    log.membership.loss_timeout = options_.loss_timeout;
    log.membership.step_timeout = options_.step_timeout;
    log.membership.beat_interval =
        std::clamp(options_.loss_timeout / kBeats, kShortestBeat, kLongestBeat);
    log.inside = checkpoint::RanksOf(*run_.model);
    log.stop_requested = options_.between.stop_requested;
    log.history_folder = options_.history_folder;
    log.patience = Patience();
    log.on_epoch = [this, keeper = registers.get()](int64_t epoch) {
      column_.EndBefore(epoch,
                        absl::AbortedError("replicas have come or gone"));
      Forget(*keeper, epoch - kKeptEpochs);
    };
    return replicas::LiveLog::Start(std::move(log), std::move(registers));
  }

  // Removes from the keeper what groups of epochs before `epoch` have left
  // there. Errors are ignored, since what then stays is little.
  void Forget(replicas::StoreRegisters& keeper, int64_t epoch) {
    forgotten_ = std::max(forgotten_, epoch - kKeptEpochs);
    for (; forgotten_ < epoch; ++forgotten_) {
      keeper
          .RemoveAll(absl::StrCat("column/", environment_.rank, "/epoch/",
                                  forgotten_, "/"))
          .IgnoreError();
    }
  }

  absl::StatusOr<std::optional<Step>> Begin() {
    if (!replica_.has_value()) {
      if (steps_done_ >= options_.steps) return std::nullopt;
      return Step{steps_done_, /*index=*/0, /*size=*/1};
    }
    const absl::StatusOr<std::optional<replicas::Roster>> begun =
        replica_->BeginStep();
    FSDP_RETURN_IF_ERROR(EndReplay(begun.status()));
    const std::optional<replicas::Roster>& roster = *begun;
    if (!roster.has_value()) return std::nullopt;
    return Step{roster->step, IndexOf(*roster, self_.replica),
                static_cast<int>(roster->members.size())};
  }

  const comm::Environment environment_;
  const ReplicaOptions options_;
  checkpoint::TrainingRun& run_;
  const replicas::ReplicaId self_;
  int64_t steps_done_;
  bool in_step_ = false;
  absl::Status failure_;
  std::unique_ptr<replicas::StoreRegisters> registers_;  // set for a replay
  replicas::Column column_;
  std::unique_ptr<replicas::StepLog>
      log_;  // its thread calls column_ and is joined first
  replicas::ReplayLog* replay_ = nullptr;  // log_ if it is a replay
  std::optional<replicas::JoinedReplica> replica_;
  int64_t forgotten_ = 0;  // epochs before this one; for the log's thread
};

}  // namespace

absl::StatusOr<std::unique_ptr<Replicas>> Replicas::Join(
    const comm::Environment& environment, checkpoint::TrainingRun* run,
    const ReplicaOptions& options) {
  FSDP_RETURN_IF_ERROR(Check(environment, run, options));
  auto replicas = std::make_unique<ReplicasOfRun>(environment, options, *run);
  if (environment.replicas > 0) FSDP_RETURN_IF_ERROR(replicas->Start());
  return replicas;
}

}  // namespace fsdp
