// Starts the ranks of a job on this host.
#ifndef COMM_LAUNCHER_LAUNCHER_H_
#define COMM_LAUNCHER_LAUNCHER_H_

#include <optional>

#include "absl/status/statusor.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher_report.h"

namespace fsdp::comm {

// Runs options.ranks > 0 copies of the program and returns when all have ended.
// They get torchrun's variables, a free port on the loopback interface
// (ReadEnvironment knows where to take it from), a secret of the job unless
// FSDP_JOB_SECRET is set, OMP_NUM_THREADS = this host's
// cores divided by the ranks unless it is set, and, where stdout_fd is a
// terminal, what TerminalColumns() reads.
//
// Where options.restarts says so, a job of which a rank has failed is started
// again, once all its ranks have ended: with a port of its own, and with the
// number of the restart in TORCHELASTIC_RESTART_COUNT. Each attempt has the
// same argv: a program goes on from what it has saved. A signal to the launcher
// ends the job, also between two attempts.
//
// Where the ranks' variables say that they are a replica (ReadEnvironment()),
// each attempt is another incarnation, FSDP_REPLICA_INCARNATION the first one,
// and as soon as a rank has failed the keeper is told that its incarnation has
// ended: by the key "replicas/gone/1/2" for incarnation 2 of replica 1. The
// secret is the keeper's; none is drawn.
//
// The ranks' output comes out in whole lines after "[rank] ", or "[1.rank] " of
// replica 1. When one fails
// the others are ended as LaunchOptions says; stopped ones too. SIGINT, SIGTERM
// and SIGHUP to this process are passed on, a second one kills all ranks at
// once, and once they have ended one is enough to give up a reader that does
// not read; SIGTSTP stops and continues them with this process; SIGQUIT and
// SIGUSR1 are passed on for the ranks to show what they are doing, or to stop
// by the latter where they have a StopRequest; ranks that do not handle them
// ignore them, and begin with SIGUSR1 blocked: see ChildProcess::Start().
// Another signal that the process ignores, such as SIGHUP under nohup, stays
// ignored. Ranks, and what they leave in their process groups, never outlive
// the call; ranks do not outlive this process either, however it ends.
//
// To be called from the main thread while there is no other, before LibTorch is
// used. Handles the signals named above and SIGCHLD until it returns; other
// children of this process are left alone.
absl::StatusOr<LaunchReport> LaunchRanks(const LaunchOptions& options);

// The columns that a progress line on standard output may take; nullopt where
// that is no terminal. Ranks ask for their launcher's terminal.
std::optional<int> TerminalColumns();

}  // namespace fsdp::comm

#endif  // COMM_LAUNCHER_LAUNCHER_H_
