// Lists the parameters and buffers of a sharded module by all of their names.
#ifndef FSDP_STATE_NAMED_VALUES_H_
#define FSDP_STATE_NAMED_VALUES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

// The place of a sharded parameter.
struct ShardedValue {
  int unit;
  const flat_param::FlatParameter* flat;
  int index;  // in flat
};

struct NamedValues {
  struct Parameter {
    std::string name;
    ShardedValue place;
  };
  struct Other {
    std::string name;
    at::Tensor tensor;         // of the module
    c10::ScalarType original;  // before mixed precision
    bool is_buffer;
  };
  std::vector<Parameter> parameters;  // tied ones under each name
  std::vector<Other> others;          // ignored parameters, buffers
};

// Reads the values of `model`, whose wrapped module is `module`.
NamedValues ReadNamedValues(const ShardedModel& model,
                            const torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_STATE_NAMED_VALUES_H_
