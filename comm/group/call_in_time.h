// Calls of other libraries that may never return.
#ifndef COMM_GROUP_CALL_IN_TIME_H_
#define COMM_GROUP_CALL_IN_TIME_H_

#include <functional>

#include "absl/time/time.h"

namespace fsdp::comm {

// Runs `call` on a thread of its own; false when it is not over at `deadline`.
// It is left behind then, with what it holds. False also where no thread can be
// started: it has not run then.
bool CallInTime(std::function<void()> call, absl::Time deadline);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_CALL_IN_TIME_H_
