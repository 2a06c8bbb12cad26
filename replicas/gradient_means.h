// Averages gradients of shards over the replicas that take part in a step.
#ifndef REPLICAS_GRADIENT_MEANS_H_
#define REPLICAS_GRADIENT_MEANS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::replicas {

// Averages one rank's gradients with its column's, in two parts, because a
// replica may be lost in between: gradients stay as they are until it is known
// over whom the mean is. Needs as much memory as the gradients. Not
// thread-safe.
class GradientMeans {
 public:
  // `column` outlives it. `leaves` are the tensors that the optimizer steps, in
  // the same order and of the same sizes and dtypes on all of the column.
  GradientMeans(comm::Communicator& column, std::vector<at::Tensor> leaves);

  // Sums the gradients of the column, into memory of its own. A leaf with a
  // gradient on some ranks counts as zeros on the others. Collective; sums are
  // made in the order of ranks, the same bits on all. After an error of any
  // rank the column is aborted.
  absl::Status Sum(absl::Time deadline);

  // Call it once, after Sum() was OK: sets gradients to the sums divided by the
  // number of ranks of the column. Sends no messages. After an error some are
  // set.
  absl::Status Apply();

 private:
  // A sum holds the gradients of one device and dtype, leaf after leaf.
  using Kind = std::pair<c10::Device, c10::ScalarType>;
  struct LessKind {
    bool operator()(const Kind& a, const Kind& b) const;
  };
  // A leaf that has a gradient anywhere in the column.
  struct Part {
    size_t leaf;
    Kind kind;
    int64_t begin;  // in sums_, in elements
  };

  absl::Status Plan(absl::Time deadline);
  absl::Status AddUp(absl::Time deadline);
  absl::Status CopyGradient(const Part& part) const;
  at::Tensor SumOf(const Part& part) const;

  comm::Communicator& column_;
  const std::vector<at::Tensor> leaves_;
  std::vector<Part> parts_;
  std::map<Kind, at::Tensor, LessKind> sums_;  // kept from step to step
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_GRADIENT_MEANS_H_
