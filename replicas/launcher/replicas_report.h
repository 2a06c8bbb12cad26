// What became of the replicas of a job.
#ifndef REPLICAS_LAUNCHER_REPLICAS_REPORT_H_
#define REPLICAS_LAUNCHER_REPLICAS_REPORT_H_

#include <string>
#include <vector>

#include "comm/launcher/processes/process_end.h"

namespace fsdp::comm {

struct ReplicasReport {
  // Of each replica's launcher, by replica. It exits with the
  // LaunchReport::exit_code() of the last attempt; other than with 0: the
  // replica was given up, or told to end.
  std::vector<ProcessEnd> replicas;

  // The replica that ended last otherwise than with 0; -1: none.
  int last_failed_replica = -1;

  // The signal that told the launcher to end; 0: none.
  int interrupt_signal = 0;

  // Why what was printed could not be written; 0: it was, or nobody reads it
  // any more.
  int output_errno = 0;

  // The keeper ended first, and with it all replicas.
  bool keeper_was_lost = false;

  // A job whose training has come to its end has done what it should, however
  // many replicas were lost on the way: 0 where one replica at least has ended
  // with 0; 1 where the keeper was lost, or where output could not be written,
  // though nobody has told the launcher to end; else that of the replica that
  // ended last: its exit code, which is 128 + interrupt_signal where that has
  // stopped it, or 128 + the signal that killed its launcher, interrupt_signal
  // where there is one.
  int exit_code() const;

  // "replica 1 exited with code 137; replicas 0, 2 exited with code 0".
  std::string ToString() const;
};

}  // namespace fsdp::comm

#endif  // REPLICAS_LAUNCHER_REPLICAS_REPORT_H_
