// Simulated steps as text: tables for people, CSV for programs.
#ifndef PLANNER_TOOL_REPORT_H_
#define PLANNER_TOOL_REPORT_H_

#include <string>
#include <vector>

#include "planner/simulator/model_shape.h"
#include "planner/simulator/step_simulator.h"

namespace fsdp::simulator {

// A step on a number of ranks.
struct ReportRow {
  int ranks = 1;
  int copies = 1;  // of the model: ranks over those that share one
  StepResult step;
};

// Times of a step, and bytes of a rank: a line for each row.
std::string StepTable(const std::vector<ReportRow>& rows);

// A line for each unit.
std::string UnitTable(const ModelShape& model, const StepResult& step);

// The numbers of StepTable in seconds and bytes, under a line of names.
std::string StepCsv(const std::vector<ReportRow>& rows);

}  // namespace fsdp::simulator

#endif  // PLANNER_TOOL_REPORT_H_
