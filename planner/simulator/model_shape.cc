#include "planner/simulator/model_shape.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flat_param/layout.h"

namespace fsdp::simulator {

int64_t ModelShape::num_elements() const {
  int64_t sum = 0;
  for (const UnitShape& unit : units) {
    for (const flat_param::ParameterSpec& parameter : unit.parameters) {
      int64_t numel = 1;
      for (const int64_t size : parameter.sizes) numel *= size;
      sum += numel;
    }
  }
  return sum;
}

flat_param::ParameterSpec Parameter(std::string name,
                                    std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<int64_t>(1, sizes[i]);
  }
  return {std::move(name), std::move(sizes), std::move(strides)};
}

}  // namespace fsdp::simulator
