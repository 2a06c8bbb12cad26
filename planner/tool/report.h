// Prints simulated steps: tables for people, CSV for programs.
#ifndef PLANNER_TOOL_REPORT_H_
#define PLANNER_TOOL_REPORT_H_

#include <string>
#include <vector>

#include "planner/simulator/model_shape.h"
#include "planner/simulator/step_simulator.h"

namespace fsdp::simulator {

// A step on this number of ranks.
struct ReportRow {
  int ranks = 1;
  int copies = 1;  // of the model: all ranks over those that share a copy
  StepResult step;
};

// Returns the times of each step and the bytes of a rank, a line per row.
std::string StepTable(const std::vector<ReportRow>& rows);

// Returns a line per unit.
std::string UnitTable(const ModelShape& model, const StepResult& step);

// Returns the numbers of StepTable() in seconds and bytes, under a line of
// names.
std::string StepCsv(const std::vector<ReportRow>& rows);

}  // namespace fsdp::simulator

#endif  // PLANNER_TOOL_REPORT_H_
