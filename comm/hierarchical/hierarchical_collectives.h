// Collectives of a hierarchical group, made of those of its parts.
#ifndef COMM_HIERARCHICAL_HIERARCHICAL_COLLECTIVES_H_
#define COMM_HIERARCHICAL_HIERARCHICAL_COLLECTIVES_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/call.h"
#include "comm/hierarchical/hierarchical_group.h"

namespace fsdp::comm {

// Blocks; for operations that run. Each makes exactly one call to the rail, and
// its errors are those of HierarchicalGroup::Finish(). Memory for what is
// between two steps comes from the host group, grows and stays.
class HierarchicalCollectives {
 public:
  // Arguments as of the Communicator's methods.
  absl::Status AllGather(HierarchicalGroup& group, const at::Tensor& out,
                         const at::Tensor& in, const std::string& label);
  absl::Status ReduceScatter(HierarchicalGroup& group, const at::Tensor& out,
                             const at::Tensor& in, ReduceOp op,
                             const std::string& label);
  absl::Status AllToAll(HierarchicalGroup& group, const at::Tensor& out,
                        const at::Tensor& in, const std::string& label);
  absl::Status AllReduce(HierarchicalGroup& group, const at::Tensor& tensor,
                         ReduceOp op, const std::string& label);
  absl::Status Broadcast(HierarchicalGroup& group, const at::Tensor& tensor,
                         int root, const std::string& label);

 private:
  absl::StatusOr<at::Tensor> Scratch(HierarchicalGroup& group,
                                     const at::Tensor& like, int64_t numel);

  at::Tensor scratch_;  // bytes
};

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HIERARCHICAL_COLLECTIVES_H_
