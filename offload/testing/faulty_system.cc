#include "offload/testing/faulty_system.h"

#include <signal.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/memory/memory.h"
#include "base/status_macros.h"

namespace fsdp::offload::testing {

class FaultySystem::Queue : public IoQueue {
 public:
  Queue(FaultySystem& system, std::unique_ptr<IoQueue> base)
      : system_(system), base_(std::move(base)) {
    absl::MutexLock lock(&system_.mutex_);
    system_.queue_ = this;
  }
  ~Queue() override {
    absl::MutexLock lock(&system_.mutex_);
    if (system_.queue_ == this) system_.queue_ = nullptr;
  }

  void Start(IoRequest* request) override {
    DiskFault fault;
    if (!system_.Next(request->kind, fault)) {
      base_->Start(request);
      return;
    }
    switch (fault.effect) {
      case DiskFault::Effect::kError:
        End(request, -fault.error);
        break;
      case DiskFault::Effect::kLost:
        End(request, request->bytes);
        break;
      case DiskFault::Effect::kShort:
      case DiskFault::Effect::kTorn:
        shortened_[request] = {request->bytes,
                               fault.effect == DiskFault::Effect::kTorn};
        request->bytes /= 2;
        base_->Start(request);
        break;
      case DiskFault::Effect::kHeld:
        held_.push_back(request);
        break;
      case DiskFault::Effect::kKill:
        kill(getpid(), SIGKILL);
        break;
    }
  }

  void Wait(std::vector<IoRequest*>& over) override {
    over.clear();
    if (ended_.empty()) base_->Wait(over);
    for (IoRequest* request : over) {
      const auto found = shortened_.find(request);
      if (found == shortened_.end()) continue;
      request->bytes = found->second.bytes;
      if (found->second.lies) request->result = request->bytes;
      shortened_.erase(found);
    }
    over.insert(over.end(), ended_.begin(), ended_.end());
    ended_.clear();
    absl::MutexLock lock(&system_.mutex_);
    if (system_.active_) return;
    for (IoRequest* request : held_) base_->Start(request);
    held_.clear();
  }

  void Wake() override { base_->Wake(); }
  int depth() const override { return base_->depth(); }
  std::string Describe() const override { return base_->Describe(); }

 private:
  struct Shortened {
    int64_t bytes;  // that were wanted
    bool lies;
  };

  void End(IoRequest* request, int64_t result) {
    request->result = result;
    ended_.push_back(request);
  }

  FaultySystem& system_;
  const std::unique_ptr<IoQueue> base_;
  std::vector<IoRequest*> ended_;
  std::vector<IoRequest*> held_;
  absl::flat_hash_map<IoRequest*, Shortened> shortened_;
};

absl::StatusOr<std::unique_ptr<IoQueue>> FaultySystem::MakeQueue(QueueKind kind,
                                                                 int descriptor,
                                                                 int depth) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> base,
                        SystemCalls::MakeQueue(kind, descriptor, depth));
  return absl::make_unique<Queue>(*this, std::move(base));
}

void FaultySystem::Inject(DiskFault fault) {
  absl::MutexLock lock(&mutex_);
  fault_ = fault;
  active_ = true;
  seen_ = 0;
}

void FaultySystem::Release() {
  absl::MutexLock lock(&mutex_);
  active_ = false;
  if (queue_ != nullptr) queue_->Wake();
}

int64_t FaultySystem::seen() const {
  absl::MutexLock lock(&mutex_);
  return seen_;
}

bool FaultySystem::Next(IoRequest::Kind kind, DiskFault& fault) {
  absl::MutexLock lock(&mutex_);
  if (!active_ || kind != fault_.kind) return false;
  const int64_t index = seen_++;
  fault = fault_;
  return index >= fault_.nth && index - fault_.nth < fault_.count;
}

}  // namespace fsdp::offload::testing
