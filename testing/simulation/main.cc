// Simulates training runs, one per seed:
//   ./bazelw run //testing/simulation -- --seeds=1000
// Ends with 1 at the first seed that has a problem.
#include <ATen/Parallel.h>
#include <stdlib.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
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
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "testing/simulation/program_seed.h"
#include "testing/simulation/scenario.h"
#include "testing/simulation/seed_run.h"

namespace fsdp::simulation {
namespace {

constexpr char kUsage[] =
    "--seeds=N    seeds from --first on, 1000\n"
    "--first=N    the first seed, 0\n"
    "--minutes=N  as many seeds as there is time for\n"
    "--seed=N     one seed, with all that happens in it\n"
    "--programs   those of //fsdp/testing/program, without faults\n"
    "--mutant=N   with a planted bug (mutant.h): ends well where it is found\n"
    "--keep_going goes on behind a seed that has a problem\n";

struct Flags {
  int64_t seeds = 1000;
  int64_t first = 0;
  int64_t minutes = 0;
  int64_t mutant = 0;
  std::optional<int64_t> seed;
  bool keep_going = false;
  bool programs = false;
};

std::optional<Flags> ParseFlags(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; ++i) {
    absl::string_view text = argv[i];
    int64_t seed = 0;
    if (text == "--keep_going") {
      flags.keep_going = true;
      continue;
    }
    if (text == "--programs") {
      flags.programs = true;
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
        number("--mutant=", &flags.mutant)) {
      continue;
    }
    std::cerr << "unknown: " << text << "\n" << kUsage;
    return std::nullopt;
  }
  if (flags.mutant < 0 || flags.mutant >= kNumMutants) return std::nullopt;
  return flags;
}

// What a crash tells: the seed that runs.
char running[64] = "";

void SayWhere(int signal) {
  const ssize_t unused = write(STDERR_FILENO, running, std::strlen(running));
  (void)unused;
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// A folder of its own, removed at the end.
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
    const absl::Time end = begin + absl::Minutes(flags_.minutes);
    int64_t seed = flags_.first;
    const auto goes_on = [&] {
      return flags_.minutes > 0 ? absl::Now() < end
                                : seed < flags_.first + flags_.seeds;
    };
    absl::Time next_word = begin + absl::Seconds(10);
    while (goes_on() && (problems_ == 0 || flags_.keep_going)) {
      Count(seed++);
      if (absl::Now() < next_word) continue;
      next_word += absl::Seconds(10);
      std::cout << Progress(seed - flags_.first, absl::Now() - begin)
                << std::endl;
    }
    for (const auto& [name, count] : features_) {
      std::cout << absl::StrFormat("%8d  %s\n", count, name);
    }
    std::cout << Progress(seed - flags_.first, absl::Now() - begin)
              << std::endl;
    return problems_ == 0 ? 0 : 1;
  }

 private:
  SeedResult Simulate(int64_t seed) {
    std::snprintf(running, sizeof(running), "while seed %llu ran\n",
                  static_cast<unsigned long long>(seed));
    return flags_.programs ? RunProgramSeed(seed, options_)
                           : RunSeed(DrawScenario(seed), options_);
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

  void Count(int64_t seed) {
    const SeedResult result = Simulate(seed);
    for (const std::string& feature : result.features) ++features_[feature];
    events_ += result.events;
    if (result.problem.empty()) return;
    ++problems_;
    std::cout << Describe(seed) << "\nPROBLEM: " << result.problem
              << "\nreplay: ./bazelw run //testing/simulation -- --seed="
              << seed << (flags_.programs ? " --programs" : "") << std::endl;
  }

  std::string Describe(int64_t seed) const {
    return flags_.programs ? absl::StrCat("program ", seed)
                           : ToString(DrawScenario(seed));
  }

  std::string Progress(int64_t seeds, absl::Duration took) const {
    return absl::StrFormat(
        "%d seeds, %.1f a second, %d events each, %d "
        "problems",
        seeds, seeds / absl::ToDoubleSeconds(took),
        seeds == 0 ? 0 : events_ / seeds, problems_);
  }

  const Flags flags_;
  const Scratch scratch_;
  SeedOptions options_;
  std::map<std::string, int64_t> features_;
  int64_t events_ = 0;
  int64_t problems_ = 0;
};

}  // namespace
}  // namespace fsdp::simulation

int main(int argc, char** argv) {
  const auto flags = fsdp::simulation::ParseFlags(argc, argv);
  if (!flags.has_value()) return 2;
  // Threads of LibTorch's would run beside.
  at::set_num_threads(1);
  for (const int signal : {SIGABRT, SIGSEGV}) {
    std::signal(signal, fsdp::simulation::SayWhere);
  }
  return fsdp::simulation::Batch(*flags).Run();
}
