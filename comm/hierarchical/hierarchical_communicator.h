// Ranks of several hosts with several ranks each: what can be done inside a
// host is done there.
#ifndef COMM_HIERARCHICAL_HIERARCHICAL_COMMUNICATOR_H_
#define COMM_HIERARCHICAL_HIERARCHICAL_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/call.h"
#include "comm/communicator.h"
#include "comm/hierarchical/hierarchical_group.h"

namespace fsdp::comm {

// One rank of a group of H hosts with L ranks each, whose ranks follow each
// other: rank = host * L + place. It is made of three groups, which belong to
// it from then on:
//
//   host     the ranks of this host, by place
//   rail     the ranks that have this rank's place on all hosts, by host
//   network  all ranks; moves no tensors, but tells all of a failure, and is
//            what Split() falls back on
//
// Every rank calls this with such parts; it does not communicate.
// InvalidArgument where they do not fit together, the ranks of the world that
// they say to be included.
//
// Between hosts each rank sends and receives 1/L of what it would in a flat
// group. All operations run in order on a thread of this group, so that they
// overlap with the caller's work, and their number is that of the calls to the
// rail until a Split() makes some more. Sums go through the places of a host,
// then through the hosts, always alike: not the bits of a local group, and
// halves are rounded once inside hosts and once between them. For what is
// between two steps each rank keeps as much as the largest all-gather or
// reduce-scatter so far has moved in all, divided by L.
//
// Calls that differ, a missed deadline, Abort() or a rank that is gone in one
// part end all parts on all ranks. A message that numbers ranks inside a part
// says how.
//
// AllocateSymmetric() gives memory of the host group. Split() gives a part's
// sub-group where no group leaves its host or every group has one place only, a
// hierarchical group where the ranks of each host follow each other on the same
// places, and otherwise, or where one of several groups is like that, a
// sub-group of the network.
//
// The parts' Work must allow a second thread to Wait() while another does, as
// local, shared-memory and Gloo groups do. CPU tensors.
absl::StatusOr<std::unique_ptr<Communicator>> CreateHierarchicalCommunicator(
    HierarchicalParts parts);

// Collectives of a hierarchical group, made of those of its parts.

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

#endif  // COMM_HIERARCHICAL_HIERARCHICAL_COMMUNICATOR_H_
