// Connects all ranks or none, and lets them exchange texts before they have a
// group.
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
#include "comm/communicator.h"
#include "comm/group/operation_watchdog.h"

namespace fsdp::comm {

// Every rank runs its `connect` on a new thread. Returns OK once all have
// succeeded. The first failure ends the call on all ranks at once: the rank
// that failed returns its status, the others the same code with "rank 2: " in
// front of its text. A `connect` that still runs is left behind, with what it
// holds. All ranks pass a store that nobody else uses. Other errors:
//   Cancelled          a rank is to stop; all ranks return this
//   DeadlineExceeded   names the ranks that were not ready at the deadline
//   Unavailable        the store broke off
//   ResourceExhausted  no thread can be started
absl::Status ConnectTogether(const c10::intrusive_ptr<c10d::Store>& store,
                             int rank, const RankNames& names,
                             const WaitLimits& limits,
                             std::function<absl::Status()> connect);

// Runs a call of another library, which may never return, on a new thread.
// Returns false if it is not over at `deadline`; it is left behind then, with
// what it holds. Also returns false if no thread can be started; `call` has not
// run then.
bool CallInTime(std::function<void()> call, absl::Time deadline);

// Returns true once all `keys` are in the store, or false at the end of the
// limits. It asks again and again, less often with time, because a wait in the
// store would print warnings at its end. Throws what the store throws.
bool AwaitKeys(c10d::Store& store, const std::vector<std::string>& keys,
               const WaitLimits& limits);

// Collective: returns the `value` of each rank, by rank. `topic` is used once
// per store. A rank that has an error instead returns it, and so do the others,
// "rank 2: " in front. `check`, which may be null, sees each value that has
// come, even if other ranks have not; its first error is returned.
// DeadlineExceeded names the ranks that have not come; Unavailable says that
// the store broke off.
absl::StatusOr<std::vector<std::string>> ExchangeByStore(
    const c10::intrusive_ptr<c10d::Store>& store, absl::string_view topic,
    int rank, const RankNames& names, const absl::StatusOr<std::string>& value,
    absl::Time deadline,
    const std::function<absl::Status(int, absl::string_view)>& check = nullptr);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_CONNECT_TOGETHER_H_
