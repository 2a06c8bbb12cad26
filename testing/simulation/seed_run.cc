#include "testing/simulation/seed_run.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <sys/prctl.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/files/testing/simulated_file_system.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"
#include "fsdp/testing/program/sharded_program.h"
#include "testing/simulation/attempt_faults.h"
#include "testing/simulation/disks.h"
#include "testing/simulation/group.h"
#include "testing/simulation/network.h"
#include "testing/simulation/plain_training.h"
#include "testing/simulation/rank_training.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

namespace {

using ::fsdp::testing::OutcomeOf;
using ::fsdp::testing::Program;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::ProgramRecord;
using ::fsdp::testing::SimulatedFileSystem;

// Puts warnings of a thread into the log.
class Warnings : public c10::WarningHandler {
 public:
  explicit Warnings(Simulation& simulation)
      : simulation_(simulation), guard_(this) {}

  void process(const c10::Warning& warning) override {
    simulation_.Log(absl::StrCat("warns: ", warning.msg()));
  }

 private:
  Simulation& simulation_;
  const c10::WarningUtils::WarningHandlerGuard guard_;
};

// Time after the last fault: a deadline of a collective, one of a save, and
// what is done before and after.
constexpr absl::Duration kLongestEnd = absl::Seconds(90);

class SeedRun {
 public:
  SeedRun(const Scenario& scenario, const SeedOptions& options)
      : scenario_(scenario),
        options_(options),
        simulation_({scenario.seed, options.keep_log}) {
    result_.features = FeaturesOf(scenario);
  }

  SeedResult Run() {
    simulation_.Enter();
    for (const Attempt& attempt : scenario_.attempts) {
      if (RunAttempt(attempt) || !result_.problem.empty()) break;
    }
    simulation_.Leave();
    result_.log_hash = simulation_.log_hash();
    result_.log = simulation_.log();
    result_.events = simulation_.events();
    return std::move(result_);
  }

 private:
  struct Rank {
    std::unique_ptr<comm::Communicator> communicator;
    std::unique_ptr<DiskView> disk;
    std::unique_ptr<SimulatedSsd> ssd;
    RankReport report;
  };

  // Returns whether all ranks have ended well.
  bool RunAttempt(const Attempt& attempt) {
    simulation_.Log(
        absl::StrCat("an attempt of ", attempt.world_size, " ranks"));
    Network network(simulation_, NetworkOf(attempt));
    world_size_ = attempt.world_size;
    std::vector<Rank> ranks(attempt.world_size);
    std::vector<int> processes(attempt.world_size);
    std::iota(processes.begin(), processes.end(), 0);
    auto communicators = CreateSimulatedGroup(network, processes);
    AttemptFaults faults(simulation_, network, attempt);
    faults.PlantRot(disk_);
    std::vector<std::function<void()>> bodies;
    for (int i = 0; i < attempt.world_size; ++i) {
      Rank& rank = ranks[i];
      rank.communicator = Mutate(std::move(communicators[i]), options_.mutant);
      rank.disk =
          std::make_unique<DiskView>(simulation_, disk_, i, options_.mutant);
      if (scenario_.training.moves_in_parts) rank.disk->MoveInParts();
      rank.ssd = std::make_unique<SimulatedSsd>(simulation_, options_.mutant);
      faults.Plant(i, *rank.disk, *rank.ssd);
      bodies.emplace_back(
          [this, &rank, &faults, i] { RunRank(i, rank, faults); });
    }
    simulation_.RunProcesses(bodies);
    for (int i = 0; i < attempt.world_size; ++i) {
      faults.Collect(i, *ranks[i].disk, *ranks[i].ssd,
                     ranks[i].report.thrown_at);
    }
    for (const Fault& fault : faults.Happened()) {
      Note({absl::StrCat("fault: ", ToString(fault.kind))});
    }
    const bool done = Judge(attempt, ranks, faults);
    ranks.clear();
    faults.RemoveRot(disk_);
    if (faults.power_is_lost()) {
      disk_.LosePower(attempt.power_seed);
    } else {
      disk_.KillProcess();
    }
    return done;
  }

  NetworkOptions NetworkOf(const Attempt& attempt) const {
    NetworkOptions network = scenario_.network;
    for (const Fault& fault : attempt.faults) {
      if (fault.kind == FaultKind::kSilence) network.notices_deaths = false;
    }
    return network;
  }

  void RunRank(int i, Rank& rank, const AttemptFaults& faults) {
    RankWorld world;
    world.scenario = &scenario_;
    world.communicator = rank.communicator.get();
    world.disk = rank.disk.get();
    world.ssd = rank.ssd.get();
    world.mutant = options_.mutant;
    world.throws_at = faults.PlaceOf(FaultKind::kThrow, i);
    world.not_finite_step =
        faults.PlaceOf(FaultKind::kNotFinite, i).value_or(0);
    world.last_step = faults.PlaceOf(FaultKind::kFinish, i).value_or(0);
    world.signal = [&faults, i] { return faults.SignalOf(i); };
    world.expected = [this](int64_t step) -> PlainTraining& {
      return Expected(step);
    };
    world.save_begins = [this](int64_t step) { saved_by_[step] = worlds_; };
    absl::Status status;
    Warnings warnings(simulation_);
    const absl::Status thrown = TorchToStatus(
        "training", [&] { status = TrainRank(world, &rank.report); });
    rank.report.status = thrown.ok() ? status : thrown;
    rank.report.ended_at = simulation_.elapsed_nanos();
    simulation_.Log(absl::StrCat("ends: ", rank.report.status.ToString()));
    rank.communicator.reset();
  }

  // Returns a training that goes on from step `step` with as many ranks as now.
  PlainTraining& Expected(int64_t step) {
    worlds_ = step < 0 ? std::vector<int>() : saved_by_[step];
    worlds_.resize(std::max<int64_t>(step, 0));
    worlds_.resize(scenario_.training.steps, world_size_);
    std::unique_ptr<PlainTraining>& expected = expected_[worlds_];
    if (expected == nullptr) {
      expected = std::make_unique<PlainTraining>(scenario_.training,
                                                 scenario_.network, worlds_);
    }
    return *expected;
  }

  // --- What has come of it --------------------------------------------------

  void Problem(const std::string& text) {
    if (result_.problem.empty()) result_.problem = text;
  }
  void Note(const std::vector<std::string>& features) {
    result_.features.insert(result_.features.end(), features.begin(),
                            features.end());
  }

  bool Judge(const Attempt& attempt, const std::vector<Rank>& ranks,
             const AttemptFaults& faults) {
    if (!simulation_.violation().empty()) Problem(simulation_.violation());
    bool all_ok = true;
    std::vector<absl::Status> ends(attempt.world_size);
    for (int i = 0; i < attempt.world_size; ++i) {
      const RankReport& report = ranks[i].report;
      JudgeLoaded(i, report);
      if (!simulation_.IsDead(i)) ends[i] = report.status;
      all_ok = all_ok && report.status.ok() && !simulation_.IsDead(i);
      if (!ends[i].ok()) JudgeError(i, report, faults);
    }
    for (const int i : RanksThatSayNothing(faults.Happened(), ends)) {
      Problem(absl::StrCat(
          "rank ", i, " does not say what has happened: ", ends[i].ToString()));
    }
    for (const Rank& rank : ranks) {
      newest_saved_ = std::max(newest_saved_, rank.report.saved);
    }
    if (faults.AllEndAlike()) JudgeAlike(ranks);
    for (const Fault& fault : attempt.faults) {
      const int64_t start = ranks[fault.rank].report.loaded.value_or(0);
      if (fault.kind == FaultKind::kNotFinite && fault.at > start && all_ok) {
        Problem(absl::StrCat("step ", fault.at, " was trained on NaN"));
      }
    }
    if (all_ok) Note({"ends well"});
    if (!std::all_of(ends.begin(), ends.end(),
                     [](const absl::Status& end) { return end.ok(); })) {
      Note({"ends with errors"});
    }
    return all_ok;
  }

  void JudgeError(int rank, const RankReport& report,
                  const AttemptFaults& faults) {
    const std::string text = report.status.ToString();
    if (absl::StrContains(text, kDiffers) || !faults.any_that_may_fail()) {
      Problem(absl::StrCat("rank ", rank, ": ", text));
      return;
    }
    const auto ended = absl::Nanoseconds(report.ended_at);
    if (ended > faults.last() + kLongestEnd) {
      Problem(absl::StrCat("rank ", rank, " ends ",
                           absl::FormatDuration(ended - faults.last()),
                           " after the last fault: ", text));
    }
  }

  // All end after one step, of which a run that saves has a checkpoint.
  void JudgeAlike(const std::vector<Rank>& ranks) {
    const absl::Status& first = ranks[0].report.status;
    for (const Rank& rank : ranks) {
      if (rank.report.status == first) continue;
      Problem(absl::StrCat("ranks end otherwise: ", first.ToString(), "; ",
                           rank.report.status.ToString()));
    }
    if (absl::IsCancelled(first) && scenario_.training.save_every > 0 &&
        !absl::StrContains(first.message(), "of which there is a checkpoint")) {
      Problem(absl::StrCat("nothing was saved: ", first.ToString()));
    }
  }

  void JudgeLoaded(int rank, const RankReport& report) {
    if (!report.loaded.has_value()) {
      if (newest_saved_.has_value() && report.status.ok()) {
        Problem(absl::StrCat("rank ", rank, " has found no checkpoint"));
      }
      return;
    }
    if (rank == 0) Note({"a checkpoint loaded"});
    if (newest_saved_.has_value() && *report.loaded < *newest_saved_) {
      Problem(absl::StrCat("rank ", rank, " has loaded step ", *report.loaded,
                           ", but step ", *newest_saved_, " was saved"));
    }
  }

  const Scenario& scenario_;
  const SeedOptions options_;
  Simulation simulation_;
  SimulatedFileSystem disk_;
  int world_size_ = 0;
  // The key says how many ranks each step had.
  std::map<std::vector<int>, std::unique_ptr<PlainTraining>> expected_;
  std::vector<int> worlds_;                       // number of ranks by step
  std::map<int64_t, std::vector<int>> saved_by_;  // worlds_ by saved step
  std::optional<int64_t> newest_saved_;
  SeedResult result_;
};

Program DrawSimulatedProgram(uint64_t seed) {
  ::fsdp::testing::DrawOptions options;
  // The system's queues would write files of tiers, and ranks are late in
  // simulated time.
  options.off = {"rest_parameters",
                 "rest_gradients",
                 "rest_states",
                 "budget",
                 "keep",
                 "late",
                 "yields",
                 "offload_activations",
                 "hosts"};
  return ::fsdp::testing::DrawProgram(static_cast<uint32_t>(seed), options);
}

// Returns the first error that is not an echo of another one.
absl::Status FirstError(const std::vector<absl::Status>& statuses) {
  absl::Status first;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    const absl::Status& status = statuses[rank];
    if (status.ok()) continue;
    const bool is_echo = absl::IsAborted(status) || absl::IsUnavailable(status);
    if (!first.ok() && is_echo) continue;
    first = Annotate(status, absl::StrCat("rank ", rank));
    if (!is_echo) break;
  }
  return first;
}

}  // namespace

SeedResult RunSeed(const Scenario& scenario, const SeedOptions& options) {
  return SeedRun(scenario, options).Run();
}

SeedResult RunProgramSeed(uint64_t seed, const SeedOptions& options) {
  const Program program = DrawSimulatedProgram(seed);
  ProgramRecord record;
  SeedResult result;
  const absl::Status plain = TorchToStatus(
      "the plain program", [&] { record = RunPlainProgram(program); });
  if (!plain.ok()) {
    result.problem = plain.ToString();
    return result;
  }
  Simulation simulation({seed, options.keep_log});
  simulation.Enter();
  {
    Network network(simulation, DrawNetwork(seed));
    std::vector<int> processes(program.ranks);
    std::iota(processes.begin(), processes.end(), 0);
    auto ranks = CreateSimulatedGroup(network, processes);
    std::vector<absl::Status> statuses(program.ranks);
    std::vector<std::function<void()>> bodies;
    bodies.reserve(program.ranks);
    for (int rank = 0; rank < program.ranks; ++rank) {
      bodies.emplace_back([&, rank] {
        const std::unique_ptr<comm::Communicator> world =
            Mutate(std::move(ranks[rank]), options.mutant);
        absl::Status& status = statuses[rank];
        Warnings warnings(simulation);
        const absl::Status thrown = TorchToStatus("training", [&] {
          // No tier of it writes to a folder.
          status = RunShardedProgram(program, record, *world, /*directory=*/"");
        });
        if (!thrown.ok()) status = thrown;
        if (!status.ok()) world->Abort(status);
      });
    }
    simulation.RunProcesses(bodies);
    const ProgramOutcome outcome = OutcomeOf(FirstError(statuses));
    if (outcome.is_failure()) result.problem = outcome.text;
    if (!simulation.violation().empty()) {
      result.problem = simulation.violation();
    }
    result.features = {outcome.kind == ProgramOutcome::kRefused ? "refused"
                                                                : "program"};
  }
  simulation.Leave();
  if (!result.problem.empty()) {
    absl::StrAppend(&result.problem, "\n  ", ToString(program));
  }
  result.log_hash = simulation.log_hash();
  result.log = simulation.log();
  result.events = simulation.events();
  return result;
}

void PrepareProcess() {
  at::set_num_threads(1);
  // One thread runs at a time, so that threads need no memory of their own.
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 16 << 20);
  // Stacks use a page or two, so that huge pages would only cost clearing.
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
}

}  // namespace fsdp::simulation
