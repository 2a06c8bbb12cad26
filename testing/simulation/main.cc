// Simulates training runs, one per seed:
//   ./bazelw run //testing/simulation -- --seeds=1000 --jobs=8
// Ends with 1 at the first seed that has a problem.
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "testing/simulation/scenario.h"
#include "testing/simulation/seed_run.h"
#include "testing/simulation/workers.h"

namespace fsdp::simulation {
namespace {

constexpr char kUsage[] =
    "--seeds=N    seeds from --first on, 1000\n"
    "--first=N    the first seed, 0\n"
    "--minutes=N  as many seeds as there is time for\n"
    "--jobs=N     processes, each of which simulates a seed at a time, 1\n"
    "--seed=N     one seed, with all that happens in it\n"
    "--hashes     that of each seed, to compare two builds\n"
    "--programs   those of //fsdp/testing/program, without faults\n"
    "--guarded    runs with a RunGuard, signals, NaN and ranks that finish\n"
    "--mutant=N   with a planted bug (mutant.h): ends well where it is found\n"
    "--keep_going goes on behind a seed that has a problem\n";

struct Flags {
  int64_t seeds = 1000;
  int64_t first = 0;
  int64_t minutes = 0;
  int64_t mutant = 0;
  int64_t jobs = 1;
  std::optional<int64_t> seed;
  bool hashes = false;
  bool keep_going = false;
  bool programs = false;
  bool guarded = false;
};

std::optional<Flags> ParseFlags(int argc, char** argv) {
  Flags flags;
  const std::map<absl::string_view, bool*> switches = {
      {"--keep_going", &flags.keep_going},
      {"--programs", &flags.programs},
      {"--guarded", &flags.guarded},
      {"--hashes", &flags.hashes}};
  for (int i = 1; i < argc; ++i) {
    absl::string_view text = argv[i];
    int64_t seed = 0;
    const auto named = switches.find(text);
    if (named != switches.end()) {
      *named->second = true;
      continue;
    }
    const auto number = [&text](absl::string_view name, int64_t* value) {
      absl::string_view rest = text;
      return absl::ConsumePrefix(&rest, name) && absl::SimpleAtoi(rest, value);
    };
    if (number("--seed=", &seed)) {
      flags.seed = seed;
      continue;
    }
    if (number("--seeds=", &flags.seeds) || number("--first=", &flags.first) ||
        number("--minutes=", &flags.minutes) ||
        number("--jobs=", &flags.jobs) || number("--mutant=", &flags.mutant)) {
      continue;
    }
    std::cerr << "unknown: " << text << "\n" << kUsage;
    return std::nullopt;
  }
  if (flags.mutant < 0 || flags.mutant >= kNumMutants || flags.jobs < 1) {
    std::cerr << kUsage;
    return std::nullopt;
  }
  return flags;
}

// Is a folder that is removed at the end.
class Scratch {
 public:
  Scratch() {
    std::string name =
        (std::filesystem::temp_directory_path() / "simulation-XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) path_ = name;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code unused;
    std::filesystem::remove_all(path_, unused);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Batch {
 public:
  explicit Batch(const Flags& flags) : flags_(flags) {
    options_.mutant = static_cast<Mutant>(flags.mutant);
    options_.scratch = scratch_.path();
    options_.keep_log = flags.seed.has_value();
  }

  int Run() {
    if (flags_.seed.has_value()) return RunOne(*flags_.seed);
    const absl::Time begin = absl::Now();
    absl::Time next_word = begin + absl::Seconds(10);
    WorkersOptions workers;
    workers.jobs = static_cast<int>(flags_.jobs);
    workers.first = flags_.first;
    if (flags_.minutes > 0) {
      workers.until = begin + absl::Minutes(flags_.minutes);
    } else {
      workers.end = flags_.first + flags_.seeds;
    }
    workers.simulate = [this](int64_t seed) { return Simulate(seed); };
    workers.take = [&](int64_t seed, const SeedResult& result) {
      Count(seed, result);
      if (absl::Now() >= next_word) {
        next_word += absl::Seconds(10);
        std::cout << Progress(absl::Now() - begin) << std::endl;
      }
      return problems_ == 0 || flags_.keep_going;
    };
    RunWorkers(workers);
    for (const auto& [name, count] : features_) {
      std::cout << absl::StrFormat("%8d  %s\n", count, name);
    }
    std::cout << Progress(absl::Now() - begin) << std::endl;
    return problems_ == 0 ? 0 : 1;
  }

 private:
  SeedResult Simulate(int64_t seed) {
    return flags_.programs ? RunProgramSeed(seed, options_)
                           : RunSeed(Draw(seed), options_);
  }

  Scenario Draw(int64_t seed) const {
    return flags_.guarded ? DrawGuarded(seed) : DrawScenario(seed);
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
    if (flags_.hashes) {
      std::cout << absl::StrFormat("seed %d log %016x, %d events\n", seed,
                                   result.log_hash, result.events);
    }
    if (result.problem.empty()) return;
    ++problems_;
    std::cout << Describe(seed) << "\nPROBLEM: " << result.problem
              << "\nreplay: ./bazelw run //testing/simulation -- --seed="
              << seed << (flags_.programs ? " --programs" : "")
              << (flags_.guarded ? " --guarded" : "") << std::endl;
  }

  std::string Describe(int64_t seed) const {
    return flags_.programs ? absl::StrCat("program ", seed)
                           : ToString(Draw(seed));
  }

  std::string Progress(absl::Duration took) const {
    return absl::StrFormat(
        "%d seeds, %.1f a second, %d events each, %d "
        "problems",
        seeds_, static_cast<double>(seeds_) / absl::ToDoubleSeconds(took),
        seeds_ == 0 ? 0 : events_ / seeds_, problems_);
  }

  const Flags flags_;
  const Scratch scratch_;
  SeedOptions options_;
  std::map<std::string, int64_t> features_;
  int64_t seeds_ = 0;
  int64_t events_ = 0;
  int64_t problems_ = 0;
};

}  // namespace
}  // namespace fsdp::simulation

int main(int argc, char** argv) {
  if (argc == 2 && absl::string_view(argv[1]) == "--help") {
    std::cout << fsdp::simulation::kUsage;
    return 0;
  }
  const auto flags = fsdp::simulation::ParseFlags(argc, argv);
  if (!flags.has_value()) return 2;
  fsdp::simulation::PrepareProcess();
  return fsdp::simulation::Batch(*flags).Run();
}
