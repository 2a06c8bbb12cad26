#include "checkpoint/tests/watched_file_system.h"

namespace fsdp::checkpoint::testing {

absl::Status WriteGate::Pass(absl::string_view what) {
  if (what != "write") return absl::OkStatus();
  const auto is_open = [this]() { return !closed_; };
  absl::MutexLock lock(&mutex_);
  ++held_;
  mutex_.Await(absl::Condition(&is_open));
  --held_;
  return absl::OkStatus();
}

void WriteGate::Hold() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
}

void WriteGate::Release() {
  absl::MutexLock lock(&mutex_);
  closed_ = false;
}

void WriteGate::AwaitHeld() {
  const auto holds = [this]() { return held_ > 0; };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&holds));
}

}  // namespace fsdp::checkpoint::testing
