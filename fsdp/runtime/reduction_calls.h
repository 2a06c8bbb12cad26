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

namespace fsdp {

// Starts them on the current stream, labels them and notes them in the order
// log. Owns nothing but labels. Not thread-safe.
class ReductionCalls {
 public:
  // Both outlive this object.
  ReductionCalls(RuntimeCommon& common, const RuntimeHooks& hooks);

  // Sums `buffer`, which has gradients, of flat parameter `i`, whose are
  // `gradients`, over the ranks that share the unit, into this rank's segment;
  // with `may_be_direct` straight into the shard's gradient, where `gradients`
  // allow it.
  struct ReduceScatter {
    std::unique_ptr<comm::Work> work;
    bool is_direct = false;
  };
  absl::StatusOr<ReduceScatter> StartReduceScatter(int unit, size_t i,
                                                   GradientBuffer& gradients,
                                                   const ReduceBuffer& buffer,
                                                   bool may_be_direct);

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
