// Connecting is done by all ranks, or by none.
#ifndef COMM_GROUP_CONNECT_TOGETHER_H_
#define COMM_GROUP_CONNECT_TOGETHER_H_

#include <c10/util/intrusive_ptr.h>

#include <functional>

#include "absl/status/status.h"
#include "comm/group/wait_limits.h"
#include "comm/rank_names.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Runs `connect` of every rank, each on a thread of its own, and returns OK
// once all have succeeded. The first that fails ends it on all ranks at once:
// there with its status, on the others with the same code and "rank 2: " in
// front of its text. What still runs then is left behind, with what it holds.
// All ranks pass a store that is for this alone. Also:
//   Cancelled          a rank is to stop, which all are told
//   DeadlineExceeded   names the ranks that are not through at the deadline
//   Unavailable        the store broke off
//   ResourceExhausted  no thread can be started
absl::Status ConnectTogether(const c10::intrusive_ptr<c10d::Store>& store,
                             int rank, const RankNames& names,
                             const WaitLimits& limits,
                             std::function<absl::Status()> connect);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_CONNECT_TOGETHER_H_
