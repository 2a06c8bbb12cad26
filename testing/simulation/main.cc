// Simulates training runs, one per seed:
//   ./bazelw run //testing/simulation -- --seeds=1000
// Ends with 1 at the first seed that has a problem.
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <limits>
#include <map>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/command_line.h"
#include "testing/simulation/scenario.h"
#include "testing/simulation/seed_run.h"

ABSL_FLAG(int64_t, seeds, 1000, "as many seeds from --first on");
ABSL_FLAG(int64_t, first, 0, "the first seed");
ABSL_FLAG(int64_t, minutes, 0, "as many seeds as there is time for");
ABSL_FLAG(int64_t, seed, -1, "one seed, with all that happens in it");
ABSL_FLAG(bool, programs, false,
          "those of //fsdp/testing/program, without faults");
ABSL_FLAG(bool, guarded, false,
          "runs with a RunGuard, signals, NaN and ranks that finish");
ABSL_FLAG(bool, keep_going, false, "go on behind a seed that has a problem");

namespace fsdp::simulation {
namespace {

volatile int64_t simulated = 0;  // the seed of now

// Says in which seed the process ends.
void TellSeed(int signal) {
  char text[64];
  const int size = std::snprintf(text, sizeof(text), "\nin seed %lld\n",
                                 static_cast<long long>(simulated));
  if (write(STDERR_FILENO, text, size) < 0) _exit(1);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

class Batch {
 public:
  Batch() { options_.keep_log = absl::GetFlag(FLAGS_seed) >= 0; }

  int Run() {
    if (options_.keep_log) return RunOne(absl::GetFlag(FLAGS_seed));
    const absl::Time begin = absl::Now();
    absl::Time next_word = begin + absl::Seconds(10);
    const int64_t minutes = absl::GetFlag(FLAGS_minutes);
    const int64_t first = absl::GetFlag(FLAGS_first);
    const int64_t end = minutes > 0 ? std::numeric_limits<int64_t>::max()
                                    : first + absl::GetFlag(FLAGS_seeds);
    for (int64_t seed = first; seed < end; ++seed) {
      if (minutes > 0 && absl::Now() >= begin + absl::Minutes(minutes)) break;
      Count(seed, Simulate(seed));
      if (absl::Now() >= next_word) {
        next_word += absl::Seconds(10);
        std::cout << Progress(absl::Now() - begin) << std::endl;
      }
      if (problems_ > 0 && !absl::GetFlag(FLAGS_keep_going)) break;
    }
    for (const auto& [name, count] : features_) {
      std::cout << absl::StrFormat("%8d  %s\n", count, name);
    }
    std::cout << Progress(absl::Now() - begin) << std::endl;
    return problems_ == 0 ? 0 : 1;
  }

 private:
  SeedResult Simulate(int64_t seed) {
    simulated = seed;
    return programs_ ? RunProgramSeed(seed, options_)
                     : RunSeed(Draw(seed), options_);
  }

  Scenario Draw(int64_t seed) const {
    return guarded_ ? DrawGuarded(seed) : DrawScenario(seed);
  }

  int RunOne(int64_t seed) {
    const SeedResult result = Simulate(seed);
    for (const std::string& line : result.log) std::cout << line << "\n";
    std::cout << Describe(seed) << "\n"
              << absl::StrFormat("log %016x, %d events\n", result.log_hash,
                                 result.events)
              << (result.problem.empty() ? "no problem" : result.problem)
              << std::endl;
    return result.problem.empty() ? 0 : 1;
  }

  void Count(int64_t seed, const SeedResult& result) {
    ++seeds_;
    events_ += result.events;
    for (const std::string& feature : result.features) ++features_[feature];
    if (result.problem.empty()) return;
    ++problems_;
    std::cout << Describe(seed) << "\nPROBLEM: " << result.problem
              << "\nreplay: ./bazelw run //testing/simulation -- --seed="
              << seed << (programs_ ? " --programs" : "")
              << (guarded_ ? " --guarded" : "") << std::endl;
  }

  std::string Describe(int64_t seed) const {
    return programs_ ? absl::StrCat("program ", seed) : ToString(Draw(seed));
  }

  std::string Progress(absl::Duration took) const {
    return absl::StrFormat(
        "%d seeds, %.1f a second, %d events each, %d "
        "problems",
        seeds_, static_cast<double>(seeds_) / absl::ToDoubleSeconds(took),
        seeds_ == 0 ? 0 : events_ / seeds_, problems_);
  }

  const bool programs_ = absl::GetFlag(FLAGS_programs);
  const bool guarded_ = absl::GetFlag(FLAGS_guarded);
  SeedOptions options_;
  std::map<std::string, int64_t> features_;
  int64_t seeds_ = 0;
  int64_t events_ = 0;
  int64_t problems_ = 0;
};

}  // namespace
}  // namespace fsdp::simulation

int main(int argc, char** argv) {
  fsdp::ParseCommandLine(
      argc, argv,
      "Simulates training runs, one per seed. Ends with 1 at the first seed "
      "that has a problem.",
      "testing/simulation/main.cc");
  for (const int end :
       {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGINT, SIGTERM}) {
    signal(end, fsdp::simulation::TellSeed);
  }
  fsdp::simulation::PrepareProcess();
  return fsdp::simulation::Batch().Run();
}
