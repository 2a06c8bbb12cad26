// A program whose ranks are processes:
//
//   int main(int argc, char** argv) {
//     return fsdp::comm::RunRanks(argc, argv, /*ranks=*/2, Train);
//   }
#ifndef COMM_RUN_RANKS_RUN_RANKS_H_
#define COMM_RUN_RANKS_RUN_RANKS_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

// What one rank does.
using RankMain =
    std::function<absl::Status(std::shared_ptr<Communicator> ranks)>;

// Where somebody has started this process as a rank (torchrun, srun, mpirun:
// see ReadEnvironment()), connects it with the others and runs `fn`. Otherwise
// starts `ranks` processes of this program on this host, with the same
// arguments, each of which does that; or runs `fn` here where `ranks` is 1 and
// there are no restarts.
//
// `restarts`: whether ranks that this process has started are started again
// when one fails; whoever starts them elsewhere decides there, as `torchrun
// --max-restarts`. `fn` has to go on from what it has saved: see
// comm/launcher/launch_options.h.
//
// What `fn` returns or throws is printed on standard error by TellEnd(), and
// ends the other ranks with its text, but for Cancelled: ranks that stop do so
// together. Returns the program's exit code: that of TellEnd(), or for the
// process that has started the ranks of LaunchReport::exit_code(). A program
// that makes a StopRequest (comm/launcher/launcher_stop_request.h) before is
// told to stop by signals and has its period() to do so: `fn` then returns
// StoppedError() (comm/launcher/launcher_report.h), or anything Cancelled, and
// the exit code is 128 + the signal, with one rank and with several, whoever
// gets the signal. Where `fn` returns OK its work was whole, and the code is 0.
// Writes past `ulimit -f` are errors meanwhile, and SIGQUIT and SIGUSR1 show
// what a rank, or each that this process has started, is doing
// (comm/inspection/inspection_signals.h), unless the program has handlers for
// them, as a StopRequest has for SIGUSR1. The process that has started ranks
// ignores both from then on.
//
// To be called first in main(): see LaunchRanks() (comm/launcher/launcher.h).
int RunRanks(int argc, char** argv, int ranks, const RankMain& fn,
             const ConnectOptions& options = {},
             const RestartOptions& restarts = {});

// Connect() (comm/bootstrap/bootstrap.h) for a program that may have a
// StopRequest: where a rank is told to stop meanwhile, all return the same
// StoppedError(). It stays for a few seconds so that all can learn of it.
absl::StatusOr<std::unique_ptr<Communicator>> ConnectOrStop(
    const Environment& environment, ConnectOptions options);

// Prints how a rank has ended on standard error and returns its exit code,
// ExitCodeOf(), or, where it is Cancelled, 128 + the signal of the StopRequest
// that has one; kUsageErrorExitCode where all ranks agree (comm::IsAgreed()) on
// NotFound, AlreadyExists, PermissionDenied or FailedPrecondition, which they
// would meet again. An error that another rank tells, since that one has failed
// first or all agree on it, is printed by one rank of each host. Instead of OK
// it is ResourceExhausted where not all that std::cout got could be written.
int TellEnd(absl::Status status, int local_rank);

// What starts ranks of this program: its arguments, and the period of its
// StopRequest where it has one, whose signals the launcher takes from here on;
// SIGQUIT and SIGUSR1 are ignored. Cancelled: it has been told to stop already.
absl::StatusOr<LaunchOptions> OptionsToLaunch(int argc, char** argv, int ranks,
                                              const RestartOptions& restarts);

// The device that a rank computes on, and how its tensors reach other ranks.

enum class DeviceBackend {
  kAuto,    // kStaged where ranks of this host share a device, else kNccl
  kNccl,    // from device to device
  kStaged,  // by way of the host's memory
};

// As a flag: auto, nccl or staged.
std::string AbslUnparseFlag(DeviceBackend backend);
bool AbslParseFlag(absl::string_view text, DeviceBackend* backend,
                   std::string* error);

struct DeviceChoice {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  ConnectDevice connect;  // for ConnectOptions::device; empty on the CPU
};

// NCCL between ranks of which this one has the GPU, as NcclBackend() of
// comm/nccl/nccl_communicator.h makes it; empty in a program that is linked
// without.
using NcclOn = std::function<ConnectDevice(c10::Device gpu)>;

// To be called by a rank, not by a process that starts ranks: it asks the
// device's runtime. FailedPrecondition: there is no such device, or this
// program lacks what it takes.
absl::StatusOr<DeviceChoice> ChooseDevice(c10::DeviceType type,
                                          DeviceBackend backend,
                                          const Environment& environment,
                                          const NcclOn& nccl_on);

// The same for a program that calls RunRanks() with `ranks`: the device of this
// process where it is a rank, and the CPU where it only starts ranks.
absl::StatusOr<DeviceChoice> ChooseDeviceOfProcess(c10::DeviceType type,
                                                   DeviceBackend backend,
                                                   int ranks,
                                                   const NcclOn& nccl_on);

}  // namespace fsdp::comm

#endif  // COMM_RUN_RANKS_RUN_RANKS_H_
