// Tells which registered tensors are one and the same parameter.
#ifndef FLAT_PARAM_TIED_PARAMETERS_H_
#define FLAT_PARAM_TIED_PARAMETERS_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "flat_param/flat_parameter.h"

namespace fsdp::flat_param {

// Tensors are tied when they are one object, or the same view of one storage.
// Empty tensors share nothing, whatever their storage.
class TiedParameters {
 public:
  // The number of the parameter that `tensor` is: that of an earlier tensor, or
  // the next one. `name` counts where it is the first.
  int Add(const std::string& name, const at::Tensor& tensor);

  // By number.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  std::vector<NamedParameter> Take() { return std::move(parameters_); }

  // InvalidArgument, naming both: parameters that share some elements but are
  // not the same view. Flattening would separate them.
  absl::Status CheckOverlaps() const;

 private:
  using View = std::tuple<const void*, int64_t, std::vector<int64_t>,
                          std::vector<int64_t>>;

  std::vector<NamedParameter> parameters_;
  std::map<const void*, int> objects_;
  std::map<View, int> views_;
};

// Tells whether tensors share memory.

// Two of `tensors`, by index, between whose first and last elements the other
// one has some; nullopt: none do. Empty tensors share nothing.
std::optional<std::pair<size_t, size_t>> FindOverlap(
    const std::vector<at::Tensor>& tensors);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_TIED_PARAMETERS_H_
