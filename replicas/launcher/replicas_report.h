// How the replicas of a job have ended.
#ifndef REPLICAS_LAUNCHER_REPLICAS_REPORT_H_
#define REPLICAS_LAUNCHER_REPLICAS_REPORT_H_

#include <string>
#include <vector>

#include "comm/launcher/processes/process_end.h"

namespace fsdp::comm {

struct ReplicasReport {
  // How each replica's launcher has ended, by replica. Its exit code is the
  // LaunchReport::exit_code() of the last attempt; not 0 means that the replica
  // was given up or told to end.
  std::vector<ProcessEnd> replicas;

  // The last replica that has not ended with 0; -1: none.
  int last_failed_replica = -1;

  // The signal that told the launcher to end; 0: none.
  int interrupt_signal = 0;

  // The error if output could not be written; 0: it was written, or nobody
  // reads it any more.
  int output_errno = 0;

  // True if the keeper ended first, and with it all replicas.
  bool keeper_was_lost = false;

  // The job's exit code. Unless the launcher was told to end, it is 1 if the
  // keeper was lost or output could not be written. Otherwise it is 0 if at
  // least one replica has ended with 0, since the training has then come to its
  // end. Otherwise it is that of the replica that ended last: its exit code,
  // which is 128 + interrupt_signal if that stopped it, or 128 + the signal
  // that killed its launcher, interrupt_signal if there is one.
  int exit_code() const;

  // "replica 1 exited with code 137; replicas 0, 2 exited with code 0".
  std::string ToString() const;
};

}  // namespace fsdp::comm

#endif  // REPLICAS_LAUNCHER_REPLICAS_REPORT_H_
