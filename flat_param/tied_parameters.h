// Finds registered tensors that are the same parameter, or share memory.
#ifndef FLAT_PARAM_TIED_PARAMETERS_H_
#define FLAT_PARAM_TIED_PARAMETERS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "flat_param/flat_parameter.h"

namespace fsdp::flat_param {

// Tensors are tied when they are one object, or the same view of one storage.
// Empty tensors share nothing, whatever their storage.
class TiedParameters {
 public:
  // Returns the number of the parameter that `tensor` is: that of an earlier
  // tensor, or the next one. `name` is used if it is the first.
  int Add(const std::string& name, const at::Tensor& tensor);

  // The parameters in the order of their numbers.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  std::vector<NamedParameter> Take() { return std::move(parameters_); }

  // InvalidArgument names two parameters that share elements but are not the
  // same view; `what`, such as "flattening", would separate them.
  absl::Status CheckOverlaps(absl::string_view what) const;

 private:
  using View = std::tuple<const void*, int64_t, std::vector<int64_t>,
                          std::vector<int64_t>>;

  std::vector<NamedParameter> parameters_;
  std::map<const void*, int> objects_;
  std::map<View, int> views_;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_TIED_PARAMETERS_H_
