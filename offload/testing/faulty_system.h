// An operating system whose disk fails when a test wants it.
#ifndef OFFLOAD_TESTING_FAULTY_SYSTEM_H_
#define OFFLOAD_TESTING_FAULTY_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/memory/memory.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "offload/system_calls.h"

namespace fsdp::offload::testing {

struct DiskFault {
  enum class Effect {
    kError,  // nothing is moved, `error` is returned
    kShort,  // the first half is moved, and that returned
    kTorn,   // the first half is moved, and success returned
    kLost,   // nothing is moved, and success returned
    kHeld,   // it starts at Release()
  };

  IoRequest::Kind kind = IoRequest::Kind::kWrite;
  // The fault hits `count` requests of this kind since Inject(), from the `nth`
  // on, counted from 0.
  int64_t nth = 0;
  int64_t count = 1;
  Effect effect = Effect::kError;
  int error = 0;
};

// It has to outlive its queues. Thread-safe.
class FaultySystem : public SystemCalls {
 public:
  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(QueueKind kind,
                                                     int descriptor,
                                                     int depth) override {
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> base,
                          SystemCalls::MakeQueue(kind, descriptor, depth));
    return absl::make_unique<Queue>(*this, std::move(base));
  }

  // Replaces the fault before.
  void Inject(DiskFault fault) {
    absl::MutexLock lock(&mutex_);
    fault_ = fault;
    active_ = true;
    seen_ = 0;
  }

  // Removes the fault, and lets what is held go on.
  void Release() {
    absl::MutexLock lock(&mutex_);
    active_ = false;
    if (queue_ != nullptr) queue_->Wake();
  }

  // Returns the number of requests of the fault's kind since Inject().
  int64_t seen() const {
    absl::MutexLock lock(&mutex_);
    return seen_;
  }

 private:
  class Queue : public IoQueue {
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

  // Returns whether the request that starts now has a fault, and which.
  bool Next(IoRequest::Kind kind, DiskFault& fault) {
    absl::MutexLock lock(&mutex_);
    if (!active_ || kind != fault_.kind) return false;
    const int64_t index = seen_++;
    fault = fault_;
    return index >= fault_.nth && index - fault_.nth < fault_.count;
  }

  mutable absl::Mutex mutex_;
  DiskFault fault_ ABSL_GUARDED_BY(mutex_);
  bool active_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t seen_ ABSL_GUARDED_BY(mutex_) = 0;
  Queue* queue_ ABSL_GUARDED_BY(mutex_) = nullptr;  // the latest
};

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_FAULTY_SYSTEM_H_
