// From what the environment says to a group of ranks.
#ifndef COMM_BOOTSTRAP_BOOTSTRAP_H_
#define COMM_BOOTSTRAP_BOOTSTRAP_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

enum class Backend {
  kAuto,   // kLocal for a single rank; kSharedMemory where all ranks are on
           // one host; a hierarchical group
           // (comm/hierarchical/hierarchical_communicator.h) of both below
           // where hosts have equally many ranks, two at least, that follow
           // each other; else kGloo, whose ToString() says why
  kLocal,  // this process alone
  kSharedMemory,  // processes of one host
  kGloo,          // processes on any number of hosts, over TCP
};

// "auto", "local", "shared_memory" or "gloo".
absl::StatusOr<Backend> ParseBackend(absl::string_view name);

struct ConnectOptions {
  // Of tensors on the CPU.
  Backend backend = Backend::kAuto;

  // Of tensors on a device, such as NcclBackend() of
  // comm/nccl/nccl_communicator.h or StagedBackend() of
  // comm/staged/staged_backend.h: the group is then a pair
  // (comm/wrappers/paired_communicator.h). Empty: CPU only.
  ConnectDevice device;

  // Until when all ranks have to have come and connected.
  absl::Duration connect_timeout = absl::Minutes(5);

  // Communicator::default_timeout() of the group.
  absl::Duration timeout = absl::Minutes(5);

  // How long a rank may wait for the others before it says on standard error
  // for what, and where they are; then after twice that time, and so on. Zero:
  // never. It is not told what a device waits for.
  absl::Duration warn_after = absl::Seconds(30);

  // Where a rank of a group that fails appends what all ranks were doing, as
  // "rank-N.txt"; empty: environment.inspection_folder, or else nowhere but,
  // shorter and once per host, on standard error.
  std::string inspection_folder;

  // Whether it is told on standard error that the group has failed: not where
  // that is expected, and somebody goes on without who is lost.
  bool shows_failures = true;

  // The network interface that peers connect to ("eth0"); empty:
  // environment.interface, or else the one that leads to rank 0.
  std::string interface;

  // Asked again and again while the ranks connect: whether this program is to
  // end, as a StopRequest (comm/launcher/launcher_stop_request.h) knows. In the
  // thread that calls Connect().
  std::function<bool()> stop_requested;

  // Ranks with different names are never taken to be on one host, whatever the
  // kernel says.
  std::string host;
};

// Joins the group of all ranks. Every process calls it once; on several hosts
// that is the first thing that they do together. The errors name this rank and
// the place where the ranks meet:
//   DeadlineExceeded    ranks are missing, by number, or rank 0 cannot be
//                       reached
//   FailedPrecondition  rank 0's port is in use; kSharedMemory with ranks on
//                       several hosts
//   InvalidArgument     the ranks disagree on the world size; kLocal with more
//                       than one process
//   AlreadyExists       two processes claim the same rank
//   Cancelled           options.stop_requested
// A rank that fails tells the others, which fail at once with the same code and
// its text.
//
// Returns within connect_timeout and a few seconds, even if a peer is stopped
// meanwhile. Rank 0 serves the others as long as its communicator exists; its
// destructor then waits a few seconds for those of the others. Where a keeper
// serves (Environment::kept_store), nobody waits.
absl::StatusOr<std::unique_ptr<Communicator>> Connect(
    const Environment& environment, const ConnectOptions& options = {});

}  // namespace fsdp::comm

#endif  // COMM_BOOTSTRAP_BOOTSTRAP_H_
