// A step as a picture.
#ifndef TOOLS_SIMULATOR_SVG_TIMELINE_H_
#define TOOLS_SIMULATOR_SVG_TIMELINE_H_

#include <string>

#include "absl/strings/string_view.h"
#include "fsdp/simulator/model_shape.h"
#include "fsdp/simulator/step_simulator.h"

namespace fsdp::simulator {

// An SVG file: a lane each for compute, for copies and the optimizer, for
// gathers and for reductions, over an axis of time. Waiting is hatched in
// compute's lane. Every bar says what it is in its title.
std::string DrawTimeline(const ModelShape& model, const StepResult& step,
                         absl::string_view title);

}  // namespace fsdp::simulator

#endif  // TOOLS_SIMULATOR_SVG_TIMELINE_H_
