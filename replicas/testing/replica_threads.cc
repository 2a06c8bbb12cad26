#include "replicas/testing/replica_threads.h"

#include <torch/optim/adamw.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "checkpoint/run/run.h"
#include "checkpoint/run/run_values.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/startup/environment.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/toy_model.h"
#include "replicas/column.h"
#include "replicas/joined_replica.h"
#include "replicas/live_log.h"
#include "replicas/membership/history.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/testing/memory_registers.h"
#include "replicas/testing/test_keeper.h"

namespace fsdp::replicas::testing {
namespace {

constexpr int64_t kRows = 3;
constexpr absl::Duration kLimit = absl::Minutes(10);

// One life of a replica, as its ranks share it.
struct Life {
  ReplicaId id;
  std::atomic<bool> is_alive{true};
};

// Reach the shared registers as long as the life lasts. Nobody has to be
// patient with the dead.
class MortalRegisters final : public ForwardingRegisters {
 public:
  // `at` lets a rank come to its end between a sum and the vote for it, or
  // right behind the vote.
  MortalRegisters(Registers& registers, const Life& life,
                  std::function<absl::Status(Moment)> at)
      : ForwardingRegisters(&registers), life_(life), at_(std::move(at)) {}

  absl::Status Set(const std::string& key, const std::string& value) override {
    const bool is_vote = absl::StrContains(key, "/vote/");
    if (is_vote) FSDP_RETURN_IF_ERROR(at_(Moment::kBeforeVote));
    FSDP_RETURN_IF_ERROR(ForwardingRegisters::Set(key, value));
    return is_vote ? at_(Moment::kAfterVote) : absl::OkStatus();
  }

 private:
  absl::Status Allow(const std::function<void()>& /*call*/) override {
    return life_.is_alive ? absl::OkStatus()
                          : absl::CancelledError("this rank is dead");
  }

  const Life& life_;
  const std::function<absl::Status(Moment)> at_;
};

struct Whereabouts {
  int64_t step = -1;
  // whether the step began with all replicas, none of which was new
  bool is_whole = false;
};

// Decides when a rank comes to its end. There is always another replica that
// has the state, since nobody ends before all are back.
class Fate {
 public:
  explicit Fate(const ThreadsOptions& options) : losses_(options.losses) {}

  // Returns Cancelled if the end has come. `life` is over if it dies.
  absl::Status At(Moment moment, const Whereabouts& where, Life& life,
                  int rank) {
    absl::MutexLock lock(&mutex_);
    // In the step after a loss the others may not have noticed it.
    if (!where.is_whole || where.step < last_ + 2) return absl::OkStatus();
    const auto due =
        std::find_if(losses_.begin(), losses_.end(), [&](const Loss& loss) {
          return loss.replica == life.id.replica && loss.rank == rank &&
                 loss.moment == moment && loss.step <= where.step;
        });
    if (due == losses_.end()) return absl::OkStatus();
    if (due->end == End::kDies) life.is_alive = false;
    losses_.erase(due);
    last_ = where.step;
    ++count_;
    return absl::CancelledError("its end has come");
  }

  int count() const {
    absl::MutexLock lock(&mutex_);
    return count_;
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<Loss> losses_ ABSL_GUARDED_BY(mutex_);
  int64_t last_ ABSL_GUARDED_BY(mutex_) = -2;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

std::vector<ReplicaId> IdsOf(const Roster& roster) {
  std::vector<ReplicaId> ids;
  ids.reserve(roster.members.size());
  for (const Member& member : roster.members) ids.push_back(member.id);
  return ids;
}

void Append(const at::Tensor& tensor, std::string& bytes) {
  const at::Tensor dense = tensor.detach().contiguous();
  bytes.append(static_cast<const char*>(dense.data_ptr()), dense.nbytes());
}

absl::StatusOr<std::string> BytesOf(const checkpoint::TrainingRun& run) {
  FSDP_ASSIGN_OR_RETURN(const checkpoint::RunValues values,
                        checkpoint::RunValues::Read(run, "the test"));
  std::string bytes;
  for (const TensorRange& leaf : values.model().parameters())
    Append(leaf.values, bytes);
  for (const auto& [name, slots] : values.optimizer()->slots) {
    for (const auto& [slot, tensor] : slots.tensors) Append(tensor, bytes);
  }
  return bytes;
}

// Holds what the ranks of all lives write down.
class Protocol {
 public:
  explicit Protocol(const ThreadsOptions& options) : options_(options) {}

  void Add(int64_t step, const std::vector<ReplicaId>& began,
           const std::vector<ReplicaId>& finished, int replica, int rank,
           std::string values) {
    absl::MutexLock lock(&mutex_);
    const bool is_known = result_.steps.count(step) > 0;
    StepRecord& record = result_.steps[step];
    if (!is_known) {
      record.began = began;
      record.finished = finished;
    }
    std::vector<std::string>& mine = record.values[replica];
    mine.resize(options_.ranks);
    if (record.began != began || record.finished != finished) {
      Contradict("others took part in step ", step, replica, rank);
    }
    if (!mine[rank].empty()) {
      Contradict("another life has finished step ", step, replica, rank);
    }
    mine[rank] = std::move(values);
    for (const auto& [other, theirs] : record.values) {
      if (theirs[rank].empty() || theirs[rank] == mine[rank]) continue;
      Contradict(absl::StrCat("replica ", other, " has other values after "),
                 step, replica, rank);
    }
  }

  void AddParameters(const StateDict& dict) {
    absl::MutexLock lock(&mutex_);
    if (!result_.parameters.empty()) return;
    for (const auto& item : dict) result_.parameters[item.key()] = item.value();
  }

  void Fail(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    result_.status.Update(status);
  }

  ThreadsResult Take(int losses) {
    absl::MutexLock lock(&mutex_);
    result_.losses = losses;
    return std::move(result_);
  }

 private:
  void Contradict(absl::string_view what, int64_t step, int replica, int rank)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    result_.status.Update(absl::InternalError(absl::StrCat(
        "rank ", rank, " of replica ", replica, ": ", what, step)));
  }

  const ThreadsOptions& options_;
  absl::Mutex mutex_;
  ThreadsResult result_ ABSL_GUARDED_BY(mutex_);
};

// Lives as long as the run.
struct Stage {
  const ThreadsOptions& options;
  MemoryRegisters registers;
  TestKeeper keeper;  // of columns
  Fate fate;
  Protocol protocol;
};

// A rank in one life of its replica.
class Rank {
 public:
  Rank(Stage& stage, Life& life, comm::Communicator& inside)
      : stage_(stage),
        life_(life),
        inside_(inside),
        column_(PlaceOf(stage, inside.rank()), ColumnOptions()) {}

  // Returns when the run is over.
  absl::Status Live() {
    FSDP_RETURN_IF_ERROR(Start());
    for (;;) {
      FSDP_RETURN_IF_ERROR(At(Moment::kBeforeBegin));
      FSDP_ASSIGN_OR_RETURN(const std::optional<Roster> begin,
                            replica_->BeginStep());
      if (!begin.has_value()) break;
      where_ = {begin->step, IsWhole(*begin)};
      FSDP_RETURN_IF_ERROR(Step(*begin));
    }
    if (where_.step < stage_.options.steps - 1)
      return absl::OkStatus();  // late
    FSDP_ASSIGN_OR_RETURN(const StateDict dict, model_->GatherStateDict());
    if (inside_.rank() == 0) stage_.protocol.AddParameters(dict);
    return absl::OkStatus();
  }

 private:
  static comm::Environment PlaceOf(const Stage& stage, int rank) {
    comm::Environment place = stage.keeper.place();
    place.kept_store_prefix = absl::StrCat("column/", rank);
    return place;
  }
  static comm::ConnectOptions ColumnOptions() {
    comm::ConnectOptions options;
    options.connect_timeout = kLimit;  // a replica comes back in a replay
    options.timeout = absl::Minutes(1);
    return options;
  }

  absl::Status At(Moment moment) {
    return stage_.fate.At(moment, where_, life_, inside_.rank());
  }

  absl::Status Start() {
    FSDP_ASSIGN_OR_RETURN(
        model_,
        FullyShard(fsdp::testing::MakeNet(kDim, kBlocks, SeedOf(life_.id)),
                   fsdp::testing::Unowned(inside_), stage_.options.sharding));
    optimizer_ = std::make_unique<torch::optim::AdamW>(
        model_->Parameters(), torch::optim::AdamWOptions(0.01));
    run_.model = model_.get();
    run_.optimizer = optimizer_.get();
    run_.random_state = false;  // threads have one generator together
    FSDP_RETURN_IF_ERROR(StartLog());
    JoinedReplicaOptions joined;
    joined.self = life_.id;
    joined.rank = inside_.rank();
    joined.steps = stage_.options.steps;
    joined.timeout = absl::Minutes(1);
    joined.patience = 3 * stage_.options.loss_timeout + absl::Seconds(10);
    replica_.emplace(joined, *log_, column_, run_);
    return absl::OkStatus();
  }

  absl::Status StartLog() {
    const ThreadsOptions& options = stage_.options;
    if (!options.replay.empty()) {
      FSDP_ASSIGN_OR_RETURN(History history, ReadHistory(options.replay));
      log_ = std::make_unique<ReplayLog>(std::move(history), life_.id,
                                         options.steps);
      return absl::OkStatus();
    }
    LiveLogOptions log;
    log.membership.self = life_.id;
    log.membership.rank = inside_.rank();
    log.membership.ranks_per_replica = options.ranks;
    log.membership.replicas = options.replicas;
    log.membership.steps = options.steps;
    log.membership.loss_timeout = options.loss_timeout;
    log.membership.beat_interval = options.loss_timeout / 20;
    log.inside = &inside_;
    log.history_folder = options.history_folder;
    log.on_epoch = [this](int64_t epoch) {
      column_.EndBefore(epoch, absl::AbortedError("another epoch has begun"));
    };
    auto registers = std::make_unique<MortalRegisters>(
        stage_.registers, life_, [this](Moment moment) { return At(moment); });
    FSDP_ASSIGN_OR_RETURN(log_,
                          LiveLog::Start(std::move(log), std::move(registers)));
    return absl::OkStatus();
  }

  bool IsWhole(const Roster& begin) const {
    return static_cast<int>(begin.members.size()) == stage_.options.replicas &&
           std::none_of(begin.members.begin(), begin.members.end(),
                        [](const Member& member) { return member.is_new; });
  }

  absl::Status Step(const Roster& begin) {
    FSDP_RETURN_IF_ERROR(At(Moment::kAfterBegin));
    const at::Tensor x = RowsOf(where_.step, IndexOf(begin, life_.id.replica),
                                static_cast<int>(begin.members.size()),
                                inside_.rank(), inside_.world_size());
    optimizer_->zero_grad();
    FSDP_RETURN_IF_ERROR(
        model_->Backward(fsdp::testing::Loss(model_->forward(x), x)));
    FSDP_RETURN_IF_ERROR(At(Moment::kAfterBackward));
    FSDP_RETURN_IF_ERROR(replica_->FinishStep());
    FSDP_RETURN_IF_ERROR(At(Moment::kAfterFinish));
    optimizer_->step();
    FSDP_ASSIGN_OR_RETURN(std::string values, BytesOf(run_));
    stage_.protocol.Add(where_.step, IdsOf(begin), IdsOf(replica_->finished()),
                        life_.id.replica, inside_.rank(), std::move(values));
    return absl::OkStatus();
  }

  Stage& stage_;
  Life& life_;
  comm::Communicator& inside_;
  FullyShardedDataParallel<fsdp::testing::NetImpl> model_{nullptr};
  std::unique_ptr<torch::optim::AdamW> optimizer_;
  checkpoint::TrainingRun run_;
  Column column_;
  std::unique_ptr<StepLog> log_;
  std::optional<JoinedReplica> replica_;
  Whereabouts where_;
};

absl::Status LiveOnce(Stage& stage, const ReplicaId& id) {
  comm::LocalGroupOptions local;
  local.timeout = absl::Minutes(1);
  FSDP_ASSIGN_OR_RETURN(const auto inside,
                        CreateLocalGroup(stage.options.ranks, local));
  Life life;
  life.id = id;
  return comm::testing::AllOk(comm::testing::RunRanks(
      inside,
      [&](comm::Communicator& ranks) {
        return Rank(stage, life, ranks).Live();
      },
      kLimit));
}

// Starts a replica again and again until the run is over.
void Supervise(Stage& stage, int replica) {
  const absl::Time deadline = absl::Now() + kLimit;
  for (int incarnation = 1;; ++incarnation) {
    const absl::Status status = LiveOnce(stage, {replica, incarnation});
    // A replay refuses a life that came after the end.
    const bool refused =
        !stage.options.replay.empty() && absl::IsInvalidArgument(status);
    if (status.ok() || refused) return;
    if (absl::Now() < deadline) continue;
    stage.protocol.Fail(absl::InternalError(absl::StrCat(
        "replica ", replica, " did not get to the end: ", status.ToString())));
    return;
  }
}

}  // namespace

int SeedOf(const ReplicaId& id) { return 100 * id.replica + id.incarnation; }

at::Tensor RowsOf(int64_t step, int index, int size, int rank, int ranks) {
  const int64_t part = (step * size + index) * ranks + rank;
  return fsdp::testing::Rows(part * kRows, kRows, kDim);
}

ThreadsResult TrainReplicas(const ThreadsOptions& options) {
  Stage stage{options, {}, TestKeeper(), Fate(options), Protocol(options)};
  std::vector<std::thread> replicas;
  replicas.reserve(options.replicas);
  for (int replica = 0; replica < options.replicas; ++replica) {
    replicas.emplace_back([&stage, replica] { Supervise(stage, replica); });
  }
  for (std::thread& replica : replicas) replica.join();
  return stage.protocol.Take(stage.fate.count());
}

}  // namespace fsdp::replicas::testing
