// LibTorch's warnings in a simulation.
#ifndef TESTING_SIMULATION_WARNINGS_H_
#define TESTING_SIMULATION_WARNINGS_H_

#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

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

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_WARNINGS_H_
