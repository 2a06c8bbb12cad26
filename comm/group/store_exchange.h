// All ranks tell each other something before they have a group.
#ifndef COMM_GROUP_STORE_EXCHANGE_H_
#define COMM_GROUP_STORE_EXCHANGE_H_

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/group/wait_limits.h"
#include "comm/rank_names.h"

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

#endif  // COMM_GROUP_STORE_EXCHANGE_H_
