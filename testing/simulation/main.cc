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
#include "absl/strings/str_format.h"
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

SeedResult Simulate(int64_t seed, bool keep_log) {
  simulated = seed;
  SeedOptions options;
  options.keep_log = keep_log;
  if (absl::GetFlag(FLAGS_programs)) return RunProgramSeed(seed, options);
  const Scenario scenario =
      absl::GetFlag(FLAGS_guarded) ? DrawGuarded(seed) : DrawScenario(seed);
  SeedResult result = RunSeed(scenario, options);
  if (keep_log || !result.problem.empty()) {
    std::cout << ToString(scenario) << "\n";
  }
  return result;
}

int RunOne(int64_t seed) {
  const SeedResult result = Simulate(seed, /*keep_log=*/true);
  for (const std::string& line : result.log) std::cout << line << "\n";
  std::cout << absl::StrFormat("log %016x, %d events\n", result.log_hash,
                               result.events)
            << (result.problem.empty() ? "no problem" : result.problem)
            << std::endl;
  return result.problem.empty() ? 0 : 1;
}

int RunMany() {
  const absl::Time begin = absl::Now();
  const int64_t minutes = absl::GetFlag(FLAGS_minutes);
  const int64_t first = absl::GetFlag(FLAGS_first);
  const int64_t end = minutes > 0 ? std::numeric_limits<int64_t>::max()
                                  : first + absl::GetFlag(FLAGS_seeds);
  const absl::Time stop =
      minutes > 0 ? begin + absl::Minutes(minutes) : absl::InfiniteFuture();
  std::map<std::string, int64_t> features;
  int64_t events = 0;
  absl::Time next_word = begin + absl::Seconds(10);
  int64_t seed = first;
  for (; seed < end && absl::Now() < stop; ++seed) {
    const SeedResult result = Simulate(seed, /*keep_log=*/false);
    events += result.events;
    for (const std::string& feature : result.features) ++features[feature];
    if (result.problem.empty()) {
      if (absl::Now() < next_word) continue;
      next_word += absl::Seconds(10);
      std::cout << seed - first + 1 << " seeds, no problem" << std::endl;
      continue;
    }
    std::cout << "PROBLEM: " << result.problem
              << "\nreplay: ./bazelw run //testing/simulation -- --seed="
              << seed << (absl::GetFlag(FLAGS_programs) ? " --programs" : "")
              << (absl::GetFlag(FLAGS_guarded) ? " --guarded" : "")
              << std::endl;
    return 1;
  }
  for (const auto& [name, count] : features) {
    std::cout << absl::StrFormat("%8d  %s\n", count, name);
  }
  const int64_t seeds = seed - first;
  std::cout << absl::StrFormat(
                   "%d seeds, %.1f a second, %d events each, no problem", seeds,
                   static_cast<double>(seeds) /
                       absl::ToDoubleSeconds(absl::Now() - begin),
                   seeds == 0 ? 0 : events / seeds)
            << std::endl;
  return 0;
}

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
  const int64_t seed = absl::GetFlag(FLAGS_seed);
  return seed >= 0 ? fsdp::simulation::RunOne(seed)
                   : fsdp::simulation::RunMany();
}
