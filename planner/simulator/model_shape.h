// The units of a model to simulate: their parameters and their compute.
#ifndef PLANNER_SIMULATOR_MODEL_SHAPE_H_
#define PLANNER_SIMULATOR_MODEL_SHAPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "flat_param/layout.h"
#include "planner/simulator/cost_model.h"

namespace fsdp::simulator {

struct UnitShape {
  std::string name;
  int parent = -1;  // index of the surrounding unit; -1 for the root, unit 0
  std::vector<flat_param::ParameterSpec> parameters;
  bool trainable = true;
  // The compute of the unit itself, without the units inside. In forward it
  // comes after them and in backward before, except for the part
  // `share_before`.
  Work forward;
  Work backward;
  double share_before = 0;
};

struct ModelShape {
  std::vector<UnitShape> units;  // parents before children, the root first

  int64_t num_elements() const;
};

// Returns a contiguous parameter of these sizes.
flat_param::ParameterSpec Parameter(std::string name,
                                    std::vector<int64_t> sizes);

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_MODEL_SHAPE_H_
