#include "fsdp/testing/program/program_fuzzer.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"

namespace fsdp::testing {

ProgramOutcome OutcomeOf(const absl::Status& status) {
  if (status.ok()) return {};
  const std::string text = status.ToString();
  if (absl::StrContains(text, "refused: ")) {
    return {ProgramOutcome::kRefused, text};
  }
  if (absl::StrContains(text, "differs: ")) {
    return {ProgramOutcome::kDiffers, text};
  }
  return {ProgramOutcome::kFails, text};
}

namespace {

class Shrinker {
 public:
  Shrinker(Program program, ProgramFails fails, int max_runs)
      : program_(program), fails_(fails), runs_left_(max_runs) {}

  // Goes over all fields once. Returns whether anything has changed.
  bool Pass() {
    const std::string before = ToString(program_);
    // Starts with steps and units: with fewer of them, fewer fields remain.
    for (const char* name : {"steps", "units", "micro", "ranks"}) Try(name);
    std::vector<std::string> names;
    for (const Field& field : Fields(program_, /*all=*/false)) {
      if (*field.value != field.plain) names.push_back(field.name);
    }
    for (const std::string& name : names) Try(name);
    return ToString(program_) != before && runs_left_ > 0;
  }

  const Program& program() const { return program_; }

 private:
  // Tries the plain value, then values between it and the present one.
  void Try(const std::string& name) {
    int distance = 0;
    for (const Field& field : Fields(program_, /*all=*/false)) {
      if (field.name == name) distance = field.plain - *field.value;
    }
    while (distance != 0 && !TryBy(name, distance)) distance /= 2;
  }

  bool TryBy(const std::string& name, int distance) {
    Program candidate = program_;
    for (const Field& field : Fields(candidate, /*all=*/false)) {
      if (field.name == name) *field.value += distance;
    }
    MakeValid(candidate);
    if (ToString(candidate) == ToString(program_)) return false;
    if (runs_left_ == 0) return false;
    --runs_left_;
    if (!fails_(candidate)) return false;
    program_ = candidate;
    return true;
  }

  Program program_;
  const ProgramFails fails_;
  int runs_left_;
};

}  // namespace

Program Shrink(Program program, ProgramFails fails, int max_runs) {
  Shrinker shrinker(program, fails, max_runs);
  while (shrinker.Pass()) {
  }
  return shrinker.program();
}

namespace {

constexpr size_t kTextLimit = 700;
constexpr size_t kRefusalLimit = 120;

// A failure that depends on timing comes back in one of a few runs.
constexpr int kAttempts = 3;

class Fuzzer {
 public:
  Fuzzer(const FuzzOptions& options, const ProgramRun& run)
      : options_(options), run_(run), start_(absl::Now()) {}

  FuzzReport Run() {
    absl::Time next_line = start_ + absl::Seconds(10);
    uint32_t seed = options_.begin;
    while (seed < options_.end && absl::Now() - start_ < options_.limit &&
           static_cast<int>(report_.failures.size()) < options_.max_failures) {
      RunOne(seed++);
      if (absl::Now() < next_line) continue;
      next_line = absl::Now() + absl::Seconds(10);
      PrintProgress(seed);
    }
    PrintEnd();
    return std::move(report_);
  }

 private:
  void RunOne(uint32_t seed) {
    const Program program = DrawProgram(seed, options_.draw);
    if (options_.verbose) {
      std::fprintf(options_.out, "seed %u: %s\n", seed,
                   ToString(program).c_str());
    }
    const ProgramOutcome outcome = run_(program);
    ++report_.seeds;
    if (outcome.is_failure()) {
      OnFailure(seed, program, outcome);
    } else if (outcome.kind == ProgramOutcome::kRefused) {
      OnRefusal(seed, outcome);
    }
  }

  void OnRefusal(uint32_t seed, const ProgramOutcome& outcome) {
    ++report_.refused;
    const std::string text = outcome.text.substr(0, kRefusalLimit);
    if (report_.refusals[text]++ > 0) return;
    std::fprintf(options_.out, "seed %u: %s\n", seed, text.c_str());
  }

  void OnFailure(uint32_t seed, const Program& program,
                 const ProgramOutcome& outcome) {
    Print("FAILED", seed, program, outcome);
    FuzzFailure failure{seed, program, outcome};
    const auto fails = [&](const Program& candidate) {
      for (int i = 0; i < kAttempts; ++i) {
        const ProgramOutcome now = run_(candidate);
        if (now.kind != outcome.kind) continue;
        failure.outcome = now;
        return true;
      }
      return false;
    };
    failure.program = Shrink(program, fails, options_.max_shrinks);
    Print("shrunk", seed, failure.program, failure.outcome);
    report_.failures.push_back(failure);
  }

  void Print(const char* what, uint32_t seed, const Program& program,
             const ProgramOutcome& outcome) const {
    std::fprintf(options_.out, "%s seed %u: %s\n  --program=\"%s\"\n", what,
                 seed, outcome.text.substr(0, kTextLimit).c_str(),
                 ToString(program).c_str());
    std::fflush(options_.out);
  }

  void PrintProgress(uint32_t seed) const {
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start_);
    std::fprintf(
        options_.out, "at seed %u: %d run, %.2f per second, %zu failed\n", seed,
        report_.seeds, report_.seeds / seconds, report_.failures.size());
    std::fflush(options_.out);
  }

  void PrintEnd() const {
    std::fprintf(
        options_.out, "%d programs in %s: %zu failed, %d were refused\n",
        report_.seeds, absl::FormatDuration(absl::Now() - start_).c_str(),
        report_.failures.size(), report_.refused);
    std::fflush(options_.out);
  }

  const FuzzOptions options_;
  const ProgramRun& run_;  // owned by the caller
  const absl::Time start_;
  FuzzReport report_;
};

}  // namespace

FuzzReport Fuzz(const FuzzOptions& options, const ProgramRun& run) {
  return Fuzzer(options, run).Run();
}

}  // namespace fsdp::testing
