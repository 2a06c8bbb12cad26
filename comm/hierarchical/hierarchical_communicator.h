// A communicator for several hosts with several ranks each, which moves between
// hosts only what has to cross them.
#ifndef COMM_HIERARCHICAL_HIERARCHICAL_COMMUNICATOR_H_
#define COMM_HIERARCHICAL_HIERARCHICAL_COMMUNICATOR_H_

#include <memory>

#include "comm/communicator.h"

namespace fsdp::comm {

// The groups that make a hierarchical one.
struct HierarchicalParts {
  std::unique_ptr<Communicator> host;
  std::unique_ptr<Communicator> rail;
  std::unique_ptr<Communicator> network;
};

// Returns one rank's end of a group of H hosts with L ranks each, whose ranks
// follow each other: rank = host * L + place. It is made of three groups, which
// it owns from then on:
//
//   host     the ranks of this host, by place
//   rail     the ranks that have this rank's place on all hosts, by host
//   network  all ranks; it moves no tensors, but tells all of a failure, and
//            Split() may use it
//
// Every rank calls this with such parts, which know the ranks of the world that
// they have; it waits for no other rank. ResourceExhausted: no thread can be
// started.
//
// It takes CPU tensors. Between hosts each rank sends and receives 1/L of what
// it would in a flat group. All operations run in order on a thread of this
// group, so that they overlap with the caller's work. Their numbers are those
// of the rail's calls until a Split(), which makes some more. Sums go through
// the places of a host, then through the hosts, always alike: the bits differ
// from those of a local group, and 16-bit numbers are rounded once inside hosts
// and once between them. Between its steps each rank keeps as much memory as
// its largest all-gather or reduce-scatter has moved in all, divided by L, or
// as its largest all-to-all has sent.
//
// Calls that differ, a missed deadline, Abort() or a lost rank in one part end
// all parts on all ranks. A message with rank numbers of a part says so.
//
// AllocateSymmetric() gives memory of the host group. Split() makes
//   a sub-group of host     if no new group leaves its host
//   a sub-group of rail     if every new group has one place only
//   a hierarchical group    if in every new group the ranks of each host follow
//                           each other, on the same places
//   a sub-group of network  otherwise
//
// A second thread has to be able to Wait() for a part's Work while another one
// does, as in local, shared-memory and Gloo groups.
CreatedCommunicator CreateHierarchicalCommunicator(HierarchicalParts parts);

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HIERARCHICAL_COMMUNICATOR_H_
