#include "comm/group/call_in_time.h"

#include <memory>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "base/start_thread.h"

namespace fsdp::comm {

bool CallInTime(std::function<void()> call, absl::Time deadline) {
  const auto ended = std::make_shared<absl::Notification>();
  absl::StatusOr<std::thread> thread = StartThread(
      "for a call that may hang", [call = std::move(call), ended]() mutable {
        call();
        call = nullptr;
        ended->Notify();
      });
  if (!thread.ok()) return false;
  const bool is_over = ended->WaitForNotificationWithDeadline(deadline);
  if (is_over) {
    thread->join();
  } else {
    thread->detach();
  }
  return is_over;
}

}  // namespace fsdp::comm
