// Sharding and training fail at each of their points: in user code, autograd,
// hooks and collectives. If all ranks fail alike, the next step is that of a
// model that has never failed, bit by bit. If one rank fails, its peers end
// with an error that names it. A parameter is never half written.
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/testing/users_error.h"
#include "fsdp/tests/errors/fault_cases.h"
#include "fsdp/tests/errors/fault_injector.h"

namespace fsdp::testing::faults {
namespace {

constexpr FaultType kFaultTypes[] = {FaultType::kStatus, FaultType::kUsers,
                                     FaultType::kTorch};

// The end of an iteration, and the type of its exception.
struct Outcome {
  absl::Status status;
  std::optional<FaultType> type;
};

Outcome Iterate(const Case& c, Trainer& trainer, int64_t part) {
  Outcome outcome;
  trainer.loss = 0;
  outcome.status = TorchToStatus("iteration", [&] {
    try {
      c.iterate(trainer, part);
    } catch (const StatusError&) {
      outcome.type = FaultType::kStatus;
      throw;
    } catch (const UsersError&) {
      outcome.type = FaultType::kUsers;
      throw;
    } catch (const c10::Error&) {
      outcome.type = FaultType::kTorch;
      throw;
    }
  });
  return outcome;
}

absl::Status Wrong(const std::string& text) {
  return absl::InternalError(text);
}

// Checks that the outcome is the injected fault, by text and code, and with
// `keeps_type` by type, too.
absl::Status CheckReported(const Outcome& outcome,
                           const FaultInjector& injector, FaultType type,
                           bool keeps_type) {
  constexpr Code kCodes[] = {Code::kDataLoss, Code::kUnknown, Code::kInternal};
  FSDP_RETURN_IF_ERROR(CheckRefused(outcome.status, injector.text(),
                                    kCodes[static_cast<int>(type)]));
  return Check(!keeps_type || outcome.type == type,
               "the exception has changed its type");
}

using Values = std::vector<at::Tensor>;

Values ShardsOf(const Trainer& trainer) {
  Values values;
  for (const TensorRange& named : trainer.model->Ranges()) {
    values.push_back(named.values.detach().clone());
  }
  return values;
}

void SetShards(Trainer& trainer, const Values& values) {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < values.size(); ++i) {
    at::Tensor shard = trainer.model->Ranges()[i].values;
    shard.copy_(values[i]);
  }
}

// Checks that each parameter has one of these values, and nothing in between.
absl::Status CheckNotTorn(const Trainer& trainer,
                          const std::vector<Values>& choices) {
  for (size_t i = 0; i < choices.front().size(); ++i) {
    const TensorRange& named = trainer.model->Ranges()[i];
    if (absl::c_none_of(choices, [&](const Values& values) {
          return at::equal(named.values, values[i]);
        })) {
      return Wrong(absl::StrCat(named.name, " is torn"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckNothingGathered(const Trainer& trainer) {
  const MemoryStats stats = trainer.model->memory_stats();
  if (stats.parameters.in_use_bytes != 0) {
    return Wrong("unsharded memory is left");
  }
  if (stats.gradients.in_use_bytes != 0) return Wrong("a gradient is left");
  for (const at::Tensor& parameter : trainer.model.module()->parameters()) {
    const absl::Status read =
        TorchToStatus("read", [&] { parameter.detach().sum(); });
    if (!absl::StrContains(read.message(), "the parameters of unit ")) {
      return Wrong(
          absl::StrCat("reading a freed parameter: ", read.ToString()));
    }
    if (parameter.requires_grad() &&
        !absl::StartsWith(parameter.grad_fn()->name(), "fsdp::Sharded")) {
      return Wrong("a parameter still belongs to a graph");
    }
  }
  return absl::OkStatus();
}

// Checks that both have done the same iteration.
absl::Status CheckSame(const Trainer& trainer, const Trainer& reference) {
  if (trainer.loss != reference.loss) {
    return Wrong(absl::StrCat("loss ", trainer.loss, ", not ", reference.loss));
  }
  return CheckNotTorn(trainer, {ShardsOf(reference)});
}

// Checks that a peer of rank `faulty_rank` has ended with its name, or without
// an error.
absl::Status CheckNamed(const absl::Status& status, int faulty_rank) {
  if (status.ok()) return status;
  if (!absl::IsDeadlineExceeded(status) &&
      (absl::StrContains(status.message(), "injected at ") ||
       absl::StrContains(status.message(),
                         absl::StrCat("rank ", faulty_rank)))) {
    return absl::OkStatus();
  }
  return Wrong(absl::StrCat("a peer ended with ", status.ToString()));
}

// A new group whose ranks have injectors.
class Group {
 public:
  Group(int world, bool aborts) : injectors_(world) {
    comm::LocalGroupOptions options;
    options.timeout = absl::Seconds(20);
    auto communicators = ValueOrThrow(comm::CreateLocalGroup(world, options));
    for (int rank = 0; rank < world; ++rank) {
      communicators_.push_back(std::make_unique<FaultyCommunicator>(
          std::move(communicators[rank]), &injectors_[rank], aborts));
    }
  }

  FaultInjector* injector(int rank) { return &injectors_[rank]; }
  // Returns whether an injected fault has occurred on any rank.
  bool has_failed() const {
    return absl::c_any_of(injectors_, [](const FaultInjector& i) {
      return !i.failed_at().empty();
    });
  }

  absl::Status Run(const std::function<absl::Status(Communicator&)>& run) {
    return AllOk(RunRanks(communicators_, run));
  }

 private:
  std::vector<FaultInjector> injectors_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// Waits until all ranks have called it, so that no rank learns of a failure by
// the end of another.
class EndOfAll {
 public:
  explicit EndOfAll(int world) : running_(world) {}

  absl::Status Reach() {
    absl::MutexLock lock(&mutex_);
    --running_;
    const auto all = [this]() { return running_ == 0; };
    return mutex_.AwaitWithTimeout(absl::Condition(&all), absl::Seconds(30))
               ? absl::OkStatus()
               : Wrong("a peer has not ended");
  }

 private:
  absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_);
};

bool IsNamedAbort(const absl::Status& status, const FaultInjector& injector) {
  return absl::IsAborted(status) &&
         absl::StrContains(status.message(), injector.text());
}

// Returns whether the iteration has reached the fault.
absl::StatusOr<bool> CheckOneFault(const Case& c, Trainer& trainer,
                                   Trainer& reference, int64_t point,
                                   FaultType type) {
  FaultInjector& injector = *trainer.injector;
  const Values before = ShardsOf(trainer);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, point).status);
  injector.Arm(point, type);
  const Outcome outcome = Iterate(c, trainer, point);
  injector.Disarm();
  if (injector.failed_at().empty()) {
    FSDP_RETURN_IF_ERROR(outcome.status);
    FSDP_RETURN_IF_ERROR(CheckSame(trainer, reference));
    return false;
  }
  const bool in_user_code =
      c.iterate == &TrainByPlainBackward || !injector.failed_in_backward();
  const bool keeps_type = in_user_code && c.iterate != &EditEach &&
                          injector.failed_at() != FaultInjector::kAllocation;
  FSDP_RETURN_IF_ERROR(CheckReported(outcome, injector, type, keeps_type));
  // Whole gradients of backwards before outlive a failure.
  trainer.model->zero_grad();
  if (c.frees_at_failure) FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
  FSDP_RETURN_IF_ERROR(
      CheckNotTorn(trainer, {before, c.edits ? ShardsOf(reference) : before}));
  // The next step must not use values of the failed iteration.
  for (const at::Tensor& values : before) values.mul_(0.75);
  SetShards(trainer, before);
  SetShards(reference, before);
  const absl::Status next = Iterate(c, trainer, point).status;
  if (c.outside_iteration && IsNamedAbort(next, injector)) return true;
  FSDP_RETURN_IF_ERROR(next);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, point).status);
  FSDP_RETURN_IF_ERROR(CheckSame(trainer, reference));
  FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
  return true;
}

// Returns whether any rank has reached the fault.
absl::StatusOr<bool> CheckFaults(const Case& c, Communicator& world,
                                 FaultInjector* injector, int64_t first_point,
                                 FaultType type) {
  FaultInjector never;
  FSDP_ASSIGN_OR_RETURN(Trainer trainer, MakeTrainer(c, world, injector));
  FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
  for (int64_t point = first_point;; ++point) {
    const absl::StatusOr<bool> failed =
        CheckOneFault(c, trainer, reference, point, type);
    if (!failed.ok()) {
      return Annotate(failed.status(), absl::StrCat("point ", point, ", ",
                                                    injector->failed_at()));
    }
    if (!*failed || c.outside_iteration) return *failed;
  }
}

class FaultInjectionTest : public ::testing::TestWithParam<Case> {};

TEST_P(FaultInjectionTest, RanksThatFailAlikeGoOnAsIfTheyNeverHad) {
  Case c = GetParam();
  c.options.abort_on_failure = false;
  for (const FaultType type : kFaultTypes) {
    SCOPED_TRACE(static_cast<int>(type));
    bool goes_on = true;
    for (int64_t point = 0; goes_on; ++point) {
      Group group(c.world, /*aborts=*/false);
      goes_on = false;
      ASSERT_OK(group.Run([&](Communicator& world) {
        return CheckFaults(c, world, group.injector(world.rank()), point, type)
            .status();
      }));
      goes_on = c.outside_iteration && group.has_failed();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, FaultInjectionTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

class FaultInShardingTest : public ::testing::TestWithParam<Case> {};

// They try again with the same modules, unless some units are sharded already,
// and with a new group, because the first may be aborted.
TEST_P(FaultInShardingTest, RanksThatFailAlikeMayTryAgain) {
  const Case& c = GetParam();
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    Group first(c.world, /*aborts=*/false);
    std::vector<std::shared_ptr<Net>> nets(c.world);
    ASSERT_OK(first.Run([&](Communicator& world) -> absl::Status {
      FaultInjector* injector = first.injector(world.rank());
      std::shared_ptr<Net>& net = nets[world.rank()];
      net = std::make_shared<Net>(injector, c.net);
      injector->Arm(point, FaultType::kStatus);
      absl::Status status = MakeTrainer(c, net, world, injector).status();
      injector->Disarm();
      if (injector->failed_at().empty()) return status;
      return CheckReported({status, std::nullopt}, *injector,
                           FaultType::kStatus, /*keeps_type=*/false);
    }));
    SCOPED_TRACE(
        absl::StrCat("point ", point, ", ", first.injector(0)->failed_at()));
    goes_on = first.has_failed();
    if (!goes_on) continue;
    Group second(c.world, /*aborts=*/false);
    ASSERT_OK(second.Run([&](Communicator& world) -> absl::Status {
      FaultInjector never;
      absl::StatusOr<Trainer> trainer =
          MakeTrainer(c, nets[world.rank()], world, &never);
      if (absl::IsFailedPrecondition(trainer.status()) &&
          absl::StrContains(trainer.status().message(), "make a new one")) {
        trainer = MakeTrainer(c, world, &never);
      }
      FSDP_RETURN_IF_ERROR(trainer.status());
      FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
      FSDP_RETURN_IF_ERROR(Iterate(c, *trainer, 0).status);
      FSDP_RETURN_IF_ERROR(Iterate(c, reference, 0).status);
      return CheckSame(*trainer, reference);
    }));
  }
}

TEST_P(FaultInShardingTest, ARankThatFailsAloneEndsItsPeers) {
  const Case& c = GetParam();
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    const int faulty = static_cast<int>(point) % c.world;
    Group group(c.world, /*aborts=*/true);
    EndOfAll end(c.world);
    std::vector<absl::Status> statuses(c.world);
    EXPECT_OK(group.Run([&](Communicator& world) -> absl::Status {
      const int rank = world.rank();
      FaultInjector* injector = group.injector(rank);
      if (rank == faulty) injector->Arm(point, FaultType::kStatus);
      const absl::StatusOr<Trainer> trainer = MakeTrainer(c, world, injector);
      statuses[rank] = trainer.status();
      injector->Disarm();
      return end.Reach();
    }));
    const std::string& failed_at = group.injector(faulty)->failed_at();
    SCOPED_TRACE(absl::StrCat("point ", point, ", ", failed_at));
    goes_on = !failed_at.empty();
    for (const absl::Status& status : statuses) {
      EXPECT_OK(CheckNamed(status, faulty));
    }
    EXPECT_NE(statuses[faulty].ok(), goes_on);
  }
}

std::vector<Case> ShardingCases() {
  std::vector<Case> cases;
  for (Case& c : Cases()) {
    if (c.name == "FullShard" || c.name == "BackwardGroups" ||
        c.name == "HybridShard") {
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, FaultInShardingTest,
                         ::testing::ValuesIn(ShardingCases()),
                         [](const auto& info) { return info.param.name; });

// Returns whether the point is in user code that the model does not see.
bool ConcernsOneRank(const std::string& point) { return point == "a scope"; }

// The outcomes of two iterations on each rank.
struct Outcomes {
  absl::Status first;
  absl::Status second;
};

absl::Status FailOnOneRank(const Case& c, Communicator& world,
                           FaultInjector* injector,
                           const std::function<void()>& arm, int faulty,
                           FaultType type, EndOfAll* end, Outcomes* outcomes) {
  FaultInjector never;
  FSDP_ASSIGN_OR_RETURN(Trainer trainer, MakeTrainer(c, world, injector));
  FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
  const Values before = ShardsOf(trainer);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, 0).status);
  const Values once = ShardsOf(reference);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, 1).status);
  const Values twice = ShardsOf(reference);

  arm();
  const Outcome outcome = Iterate(c, trainer, 0);
  injector->Disarm();
  outcomes->first = outcome.status;
  if (!outcome.status.ok()) {
    const bool fails_here = !injector->failed_at().empty();
    if (fails_here) {
      FSDP_RETURN_IF_ERROR(
          CheckReported(outcome, *injector, type, /*keeps_type=*/false));
    }
    trainer.model->zero_grad();
    if (fails_here && c.frees_at_failure) {
      FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
    }
    FSDP_RETURN_IF_ERROR(
        CheckNotTorn(trainer, {before, c.edits ? once : before}));
  }
  outcomes->second = Iterate(c, trainer, 1).status;
  FSDP_RETURN_IF_ERROR(end->Reach());
  FSDP_RETURN_IF_ERROR(CheckNamed(outcomes->first, faulty));
  FSDP_RETURN_IF_ERROR(CheckNamed(outcomes->second, faulty));
  return outcomes->second.ok() ? absl::OkStatus()
                               : CheckNotTorn(trainer, {before, once, twice});
}

void ExpectAllRanksEnd(const Case& c, FaultType type, absl::string_view part) {
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    Group group(c.world, /*aborts=*/c.outside_iteration);
    EndOfAll end(c.world);
    std::vector<Outcomes> outcomes(c.world);
    const int faulty = static_cast<int>(point) % c.world;
    const absl::Status status = group.Run([&](Communicator& world) {
      const int rank = world.rank();
      const auto arm = [&, rank] {
        if (rank == faulty) group.injector(rank)->Arm(point, type, part);
      };
      return FailOnOneRank(c, world, group.injector(rank), arm, faulty, type,
                           &end, &outcomes[rank]);
    });
    const std::string& failed_at = group.injector(faulty)->failed_at();
    SCOPED_TRACE(absl::StrCat("point ", point, ", ", failed_at));
    ASSERT_OK(status);
    goes_on = !failed_at.empty();
    if (!goes_on) continue;
    EXPECT_FALSE(outcomes[faulty].first.ok());
    for (const Outcomes& of_rank : outcomes) {
      // Either all ranks go on, or none.
      EXPECT_EQ(of_rank.second.ok(), outcomes[faulty].second.ok());
      if (ConcernsOneRank(failed_at)) {
        EXPECT_OK(of_rank.second);
      } else {
        EXPECT_FALSE(of_rank.first.ok() && of_rank.second.ok());
      }
    }
  }
}

class OneRankFaultTest : public ::testing::TestWithParam<Case> {};

TEST_P(OneRankFaultTest, ARankThatFailsAloneEndsItsPeersWithItsName) {
  const Case& c = GetParam();
  for (const FaultType type : {FaultType::kStatus, FaultType::kUsers}) {
    SCOPED_TRACE(static_cast<int>(type));
    if (!c.outside_iteration) {
      ExpectAllRanksEnd(c, type, /*part=*/"");
      continue;
    }
    // Agreements between steps use the group of all ranks: the others do not
    // learn of a failure on one rank alone.
    ExpectAllRanksEnd(c, type, /*part=*/" of first");
    Case one_group = c;
    one_group.replicas = 1;
    one_group.options.unit.strategy = ShardingStrategy::kFullShard;
    ExpectAllRanksEnd(one_group, type, /*part=*/"");
  }
}

std::vector<Case> CasesThatTellPeers() {
  std::vector<Case> cases = Cases();
  cases.erase(std::remove_if(cases.begin(), cases.end(),
                             [](const Case& c) { return !c.tells_peers; }),
              cases.end());
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, OneRankFaultTest,
                         ::testing::ValuesIn(CasesThatTellPeers()),
                         [](const auto& info) { return info.param.name; });

}  // namespace

}  // namespace fsdp::testing::faults
