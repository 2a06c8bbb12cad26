// Starts the ranks of a job on this host.
#ifndef COMM_LAUNCHER_LAUNCHER_H_
#define COMM_LAUNCHER_LAUNCHER_H_

#include "absl/status/statusor.h"
#include "comm/launcher/launch_options.h"

namespace fsdp::comm {

// Runs options.ranks > 0 copies of the program and returns when all have ended.
// Call it from the main thread, while there is no other and before LibTorch is
// used.
//
// The ranks get torchrun's variables with a free port on the loopback interface
// (ReadEnvironment() reads them), a random FSDP_JOB_SECRET and OMP_NUM_THREADS
// = UsableCores() / ranks unless these are set. Their output is written in
// whole lines after "[rank] ", or "[1.rank] " for replica 1.
//
// When a rank fails, the others are ended as LaunchOptions says, even those
// that are stopped. If options.restarts says so, the job is started again once
// all have ended: with a new port, the number of the restart in
// TORCHELASTIC_RESTART_COUNT and the same argv. The program goes on from what
// it has saved.
//
// Where the ranks' variables say that they are a replica (ReadEnvironment()),
// each attempt is another incarnation, from FSDP_REPLICA_INCARNATION on. As
// soon as a rank fails, the keeper is told that its incarnation has ended: by
// the key "replicas/gone/1/2" for incarnation 2 of replica 1. The secret is the
// keeper's.
//
// Signals to this process:
//   SIGINT, SIGTERM, SIGHUP  are passed on and end the job, between two
//                            attempts, too; a second one kills all ranks. Once
//                            these have ended, one is enough to give up a
//                            reader that does not read their output.
//   SIGTSTP                  stops the ranks with this process; they continue
//                            with it
//   SIGQUIT, SIGUSR1         are passed on: the ranks show what they are doing,
//                            or stop by SIGUSR1 if they have a StopRequest.
//                            Ranks without a handler ignore them, and begin
//                            with SIGUSR1 blocked (ChildProcess::Start()).
// These and SIGCHLD are handled until the call returns. The first four stay
// ignored where the process ignores them, as SIGHUP under nohup.
//
// Ranks, and what they leave in their process groups, never outlive the call,
// nor do ranks outlive this process, however it ends. Its other children are
// left alone.
absl::StatusOr<LaunchReport> LaunchRanks(const LaunchOptions& options);

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_H_
