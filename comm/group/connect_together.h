// Connecting is done by all ranks, or by none.
#ifndef COMM_GROUP_CONNECT_TOGETHER_H_
#define COMM_GROUP_CONNECT_TOGETHER_H_

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/call.h"
#include "comm/group/operation_watchdog.h"

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

// Calls of other libraries that may never return.

// Runs `call` on a thread of its own; false when it is not over at `deadline`.
// It is left behind then, with what it holds. False also where no thread can be
// started: it has not run then.
bool CallInTime(std::function<void()> call, absl::Time deadline);

}  // namespace fsdp::comm

// All ranks tell each other something before they have a group.

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Looks for `keys` until all are there, ever more rarely: a wait in the store
// would print warnings when its time is over. Whether they came within the
// limits. Throws what the store throws.
bool AwaitKeys(c10d::Store& store, const std::vector<std::string>& keys,
               const WaitLimits& limits);

// What each rank has passed, by rank. `topic` is used once per store.
// DeadlineExceeded names a rank that has not come; Unavailable: the store broke
// off.
absl::StatusOr<std::vector<std::string>> ExchangeByStore(
    const c10::intrusive_ptr<c10d::Store>& store, absl::string_view topic,
    int rank, const RankNames& names, absl::string_view value,
    absl::Time deadline);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_CONNECT_TOGETHER_H_
