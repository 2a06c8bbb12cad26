#include "comm/call_in_time.h"

#include <memory>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"

namespace fsdp::comm {

bool CallInTime(std::function<void()> call, absl::Time deadline) {
  const auto ended = std::make_shared<absl::Notification>();
  std::thread thread([call = std::move(call), ended]() mutable {
    call();
    call = nullptr;
    ended->Notify();
  });
  const bool is_over = ended->WaitForNotificationWithDeadline(deadline);
  if (is_over) {
    thread.join();
  } else {
    thread.detach();
  }
  return is_over;
}

}  // namespace fsdp::comm
