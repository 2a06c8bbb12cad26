// Connects the ranks of a job, and lets SIGQUIT and SIGUSR1 ask what a rank is
// doing.
#ifndef COMM_BOOTSTRAP_BOOTSTRAP_H_
#define COMM_BOOTSTRAP_BOOTSTRAP_H_

#include <signal.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

// The kinds of groups for tensors on the CPU.
enum class Backend {
  // kLocal for a single rank; kSharedMemory where all ranks are on one host; a
  // hierarchical group (comm/hierarchical/hierarchical_communicator.h) where
  // all hosts have the same number of ranks, two or more, that follow each
  // other; else kGloo, whose ToString() says why.
  kAuto,
  kLocal,         // this process alone
  kSharedMemory,  // processes of one host
  kGloo,          // processes on any number of hosts, over TCP
};

// Parses "auto", "local", "shared_memory" or "gloo".
absl::StatusOr<Backend> ParseBackend(absl::string_view name);

// Options of Connect(). All ranks pass the same `backend`, and all a
// `device` or none.
struct ConnectOptions {
  // The backend for tensors on the CPU.
  Backend backend = Backend::kAuto;

  // Connects the backend for tensors on a device, such as NcclBackend() of
  // comm/nccl/nccl_communicator.h; the group is then a pair
  // (comm/wrappers/paired_communicator.h). Empty: CPU only.
  ConnectDevice device;

  // All ranks have to connect within this time.
  absl::Duration connect_timeout = absl::Minutes(5);

  // Communicator::default_timeout() of the group.
  absl::Duration timeout = absl::Minutes(5);

  // If a rank has waited this long for the others, it says on standard error
  // what it waits for and where they are. It does so again after twice that
  // time, and so on. Zero: never. Waits of a device are not reported.
  absl::Duration warn_after = absl::Seconds(30);

  // When a group fails, each of its ranks appends what all ranks were doing to
  // "rank-N.txt" in this folder. Empty: environment.inspection_folder. If that
  // is empty, too, no file is written.
  std::string inspection_folder;

  // If true, one rank of each host also says so, shorter, on standard error, if
  // the cause is a deadline or a lost rank. Set it to false where a loss is
  // expected and somebody goes on without the lost ranks.
  bool shows_failures = true;

  // The network interface that peers connect to ("eth0"). Empty:
  // environment.interface, or else the one that leads to rank 0.
  std::string interface;

  // Called again and again while the ranks connect, in the thread that calls
  // Connect(). It returns true once this program is to end, as a StopRequest
  // (comm/launcher/launch_options.h) knows.
  std::function<bool()> stop_requested;

  // Ranks with different names here are never taken to be on one host, whatever
  // the kernel says.
  std::string host;
};

// Joins the group of all ranks. Every process calls it once, before all else
// that the ranks do together. The errors name this rank and the place where the
// ranks meet:
//   DeadlineExceeded    ranks are missing, by number, or rank 0 cannot be
//                       reached
//   FailedPrecondition  rank 0's port is in use; kSharedMemory with ranks on
//                       several hosts
//   InvalidArgument     the ranks disagree on the world size; kLocal with more
//                       than one process
//   AlreadyExists       two processes claim the same rank
//   Cancelled           options.stop_requested has returned true
// A rank that fails tells the others, which fail at once with the same code and
// its text.
//
// Returns within connect_timeout and a few seconds, even if a peer is stopped
// meanwhile. Rank 0 serves the others as long as its communicator exists, whose
// destructor waits a few seconds for those of the others. With a keeper
// (Environment::kept_store) nobody waits.
absl::StatusOr<std::unique_ptr<Communicator>> Connect(
    const Environment& environment, const ConnectOptions& options = {});

// While it exists, SIGQUIT and SIGUSR1 do not end the process but make it write
// the phase, the last operations and the memory of the rank
// (RankActivity::Describe()), on a thread of its own.
class InspectionSignals {
 public:
  // Appends to files "rank-N.txt" in `folder`, or writes to standard error if
  // `folder` is empty. RunRanks() calls it; other programs call it once. A
  // handler that the program has for SIGUSR1 stays. FailedPrecondition: the
  // program has a handler for SIGQUIT or there is another InspectionSignals;
  // nothing is installed. ResourceExhausted: no thread or descriptor is left.
  static absl::StatusOr<std::unique_ptr<InspectionSignals>> Install(
      const std::string& folder = "");

  // Restores the previous handlers, except those that the program has set
  // since.
  ~InspectionSignals();
  InspectionSignals(const InspectionSignals&) = delete;
  InspectionSignals& operator=(const InspectionSignals&) = delete;

  // From now on answers are those of `ranks`, which Connect() has returned,
  // even after its end. Thread-safe.
  void Show(const Communicator& ranks);

 private:
  explicit InspectionSignals(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Start();
  void Answer();
  void Write(int rank, const std::string& text) const;

  const std::string folder_;
  int fd_ = -1;
  // SIGQUIT and SIGUSR1 in this order: is the signal this object's, and who had
  // it before?
  std::array<bool, 2> taken_ = {};
  std::array<struct sigaction, 2> previous_ = {};
  std::thread thread_;
  absl::Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<RankActivity> activity_ ABSL_GUARDED_BY(mutex_);
  int rank_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace fsdp::comm

#endif  // COMM_BOOTSTRAP_BOOTSTRAP_H_
