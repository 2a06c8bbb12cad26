// The collectives that sum gradients: the communicator's own, or the user's.
#ifndef FSDP_RUNTIME_REDUCTION_CALLS_H_
#define FSDP_RUNTIME_REDUCTION_CALLS_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/work.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/gradient_layout.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/runtime/shard_gradient.h"

namespace fsdp {

// Starts them on the current stream, labels them and notes them in the order
// log. Owns nothing but labels. Not thread-safe.
class ReductionCalls {
 public:
  // Both outlive this object.
  ReductionCalls(RuntimeCommon& common, const RuntimeHooks& hooks);

  // Sums `buffer`, which has gradients, of flat parameter `i` over the ranks
  // that share the unit: into this rank's segment, or, where `direct` is not
  // null and allows it, straight into the shard's gradient.
  struct ReduceScatter {
    std::unique_ptr<comm::Work> work;
    bool is_direct = false;
  };
  absl::StatusOr<ReduceScatter> StartReduceScatter(
      int unit, size_t i, const GradientBuffer& gradients,
      const ReduceBuffer& buffer, ShardGradient* direct);

  // Sums it over replicas, in place in this rank's segment.
  absl::StatusOr<std::unique_ptr<comm::Work>> StartAllReduce(
      int unit, size_t i, const GradientBuffer& gradients,
      const ReduceBuffer& buffer);

 private:
  const std::string& Label(int unit, size_t i, const GradientLayout& layout);

  RuntimeCommon& common_;
  const RuntimeHooks& hooks_;
  // In reductions of some of the parameters, by which are trained: per unit and
  // flat parameter.
  std::vector<std::vector<std::map<std::vector<bool>, std::string>>> labels_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_REDUCTION_CALLS_H_
