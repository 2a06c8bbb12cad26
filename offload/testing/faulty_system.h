// An operating system whose disk fails when a test wants it.
#ifndef OFFLOAD_TESTING_FAULTY_SYSTEM_H_
#define OFFLOAD_TESTING_FAULTY_SYSTEM_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "offload/system_calls.h"

namespace fsdp::offload::testing {

struct DiskFault {
  enum class Effect {
    kError,  // nothing is moved, `error` is returned
    kShort,  // the first half is moved, and that returned
    kTorn,   // the first half is moved, and success returned
    kLost,   // nothing is moved, and success returned
    kHeld,   // it starts at Release()
    kKill,   // SIGKILL for this process
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
                                                     int depth) override;

  // Replaces the fault before.
  void Inject(DiskFault fault);
  // Removes the fault, and lets what is held go on.
  void Release();
  // Returns the number of requests of the fault's kind since Inject().
  int64_t seen() const;

 private:
  class Queue;

  // Returns whether the request that starts now has a fault, and which.
  bool Next(IoRequest::Kind kind, DiskFault& fault);

  mutable absl::Mutex mutex_;
  DiskFault fault_ ABSL_GUARDED_BY(mutex_);
  bool active_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t seen_ ABSL_GUARDED_BY(mutex_) = 0;
  Queue* queue_ ABSL_GUARDED_BY(mutex_) = nullptr;  // the latest
};

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_FAULTY_SYSTEM_H_
