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

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

// The function that each rank runs.
using RankMain =
    std::function<absl::Status(std::shared_ptr<Communicator> ranks)>;

// Runs the ranks of this program and returns its exit code. A process that a
// launcher has started as a rank (torchrun, srun, mpirun: see
// ReadEnvironment()) connects with the others and runs `fn`. Another one starts
// `ranks` processes of this program on this host, with the same arguments, as
// ranks. A single rank without restarts runs `fn` here.
//
// `restarts` says whether ranks that this process has started are started again
// when one fails (comm/launcher/launch_options.h); `fn` then has to go on from
// what it has saved. Another launcher decides that by itself, as `torchrun
// --max-restarts` does.
//
// An error that `fn` returns or throws is printed by TellEnd() and ends the
// other ranks with its text. Cancelled ends no other rank: ranks that stop do
// so together. The exit code of a rank is that of TellEnd(), that of a process
// that has started ranks is LaunchReport::exit_code().
//
// A program that has made a StopRequest (comm/launcher/launch_options.h) is
// told to stop by signals and has its period() to do so. `fn` then returns
// StoppedError() or another Cancelled, and the exit code is 128 + the signal,
// whichever process gets that. If `fn` returns OK all its work was done, and
// the code is 0.
//
// During the call, writes past `ulimit -f` are errors, and SIGQUIT and SIGUSR1
// make a rank, or all ranks that this process has started, show what they do
// (InspectionSignals). A handler that the program has for
// one of them stays, such as that of a StopRequest for SIGUSR1. A process that
// has started ranks ignores both signals afterwards.
//
// Call it first in main(): see LaunchRanks() (comm/launcher/launcher.h).
int RunRanks(int argc, char** argv, int ranks, const RankMain& fn,
             const ConnectOptions& options = {},
             const RestartOptions& restarts = {});

// Connects as Connect() does (comm/bootstrap/bootstrap.h), for a program that
// may have a StopRequest. If a rank is told to stop meanwhile, it goes on for a
// few seconds, so that all ranks return the same StoppedError().
absl::StatusOr<std::unique_ptr<Communicator>> ConnectOrStop(
    const Environment& environment, ConnectOptions options);

// Prints on standard error how a rank has ended, and returns its exit code:
//   kUsageErrorExitCode  where all ranks agree (comm::IsAgreed()) on NotFound,
//                        AlreadyExists, PermissionDenied or FailedPrecondition,
//                        which they would meet again
//   128 + the signal     for Cancelled, where a StopRequest has got a signal
//   ExitCodeOf(status)   otherwise
// An error that the ranks agree on, or that another rank has caused (Aborted),
// is printed by one rank of each host only. OK becomes ResourceExhausted where
// a part of what was printed to std::cout could not be written.
int TellEnd(absl::Status status, int local_rank);

// Returns the options to start ranks of this program: its arguments, and the
// period of its StopRequest, if it has one, whose signals the launcher takes
// from here on. SIGQUIT and SIGUSR1 are ignored. Cancelled says that the
// program has been told to stop already.
absl::StatusOr<LaunchOptions> OptionsToLaunch(int argc, char** argv, int ranks,
                                              const RestartOptions& restarts);

// Returns the device of a host's rank r: device r modulo the number of those
// that this process sees. FailedPrecondition says that there is none, or that
// LibTorch's part for them is not linked.
absl::StatusOr<c10::Device> DeviceOfRank(c10::DeviceType type, int local_rank);

// The device and the backend of a rank.
struct DeviceChoice {
  // For the model and its inputs, with an index unless it is the CPU.
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  ConnectDevice connect;  // for ConnectOptions::device; empty on the CPU
};

// Makes the backend of a rank that has this GPU, as NcclBackend() of
// comm/nccl/nccl_communicator.h does. Empty in a program that is linked without
// NCCL: one rank needs none.
using NcclOn = std::function<ConnectDevice(c10::Device gpu)>;

// Chooses the device and the backend of a rank. It asks the device's runtime,
// so call it in a rank, not in a process that starts ranks. FailedPrecondition:
// there is no such device, or this program is linked without support for it, or
// for several ranks on devices.
absl::StatusOr<DeviceChoice> ChooseDevice(c10::DeviceType type,
                                          const Environment& environment,
                                          const NcclOn& nccl_on);

// Does the same in a program that calls RunRanks() with `ranks`. A process that
// only starts ranks gets the CPU.
absl::StatusOr<DeviceChoice> ChooseDeviceOfProcess(c10::DeviceType type,
                                                   int ranks,
                                                   const NcclOn& nccl_on);

}  // namespace fsdp::comm

#endif  // COMM_RUN_RANKS_RUN_RANKS_H_
