#include "fsdp/testing/program/program_shrinker.h"

#include <string>
#include <vector>

#include "fsdp/testing/program/program.h"

namespace fsdp::testing {
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

}  // namespace fsdp::testing
