// One rank's end of a group whose operations a c10d backend carries out.
#ifndef COMM_C10D_BACKEND_C10D_BACKEND_GROUP_H_
#define COMM_C10D_BACKEND_C10D_BACKEND_GROUP_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/c10d_backend/c10d_completion.h"
#include "comm/call.h"
#include "comm/group/report_exchange.h"
#include "comm/group/watched_group.h"
#include "comm/rank_names.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// A failure ends the group: the backend is closed, and peers hear of it through
// the store. Thread-safe, but for Launch(), whose calls are ordered by the
// caller.
class C10dBackendGroup {
 public:
  struct Options {
    RankNames names;
    c10::Device device = c10::Device(c10::DeviceType::CPU);
    bool host_waits = true;  // in the backend's Work::wait()
    absl::Duration timeout = absl::Minutes(5);
    absl::Duration diagnosis_timeout = absl::Seconds(2);
    std::function<bool()> is_capturing;  // may be empty: never
    std::function<void()> close;         // ends what runs
    std::function<void()> leave;         // when nothing runs; may be empty
  };

  class Operation {
   public:
    Operation(std::shared_ptr<WatchedGroup::Operation> entry,
              std::shared_ptr<C10dCompletion> completion, bool is_captured)
        : entry_(std::move(entry)),
          completion_(std::move(completion)),
          is_captured_(is_captured) {}

   private:
    friend class C10dBackendGroup;

    const std::shared_ptr<WatchedGroup::Operation> entry_;
    const std::shared_ptr<C10dCompletion> completion_;
    const bool is_captured_;
  };

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Calls the backend; nullptr where there is nothing to do.
  using Start = absl::FunctionRef<WorkPtr(c10d::Backend&)>;
  // What LibTorch does behind it, by this rank's thread or another.
  using Finish = std::function<void()>;

  // No other group uses `store`.
  static absl::StatusOr<std::shared_ptr<C10dBackendGroup>> Create(
      c10::intrusive_ptr<c10d::Backend> backend,
      const c10::intrusive_ptr<c10d::Store>& store, Options options);

  // Calls Leave().
  ~C10dBackendGroup();

  // Makes no more calls: what runs is ended, and the peers' operations that
  // need this rank fail.
  void Leave();

  int rank() const { return watched_.rank(); }
  int world_size() const { return watched_.world_size(); }
  const RankNames& names() const { return watched_.names(); }
  c10::Device device() const { return options_.device; }
  absl::Duration timeout() const { return watched_.timeout(); }

  // The next operation. Unimplemented, which leaves the group as it is: the
  // backend has no such operation. What is captured into a graph is done to the
  // watchdog, and BlockCurrentStream() is what can be done with it.
  absl::StatusOr<std::shared_ptr<Operation>> Launch(Call call, int64_t bytes,
                                                    Start start, Finish finish);

  // As the methods of Work. FailedPrecondition: to wait for a captured one.
  absl::Status Wait(const Operation& operation, absl::Time deadline);
  absl::Status BlockCurrentStream(const Operation& operation);

  // Keeps `tensors` until `operation` is done.
  void Keep(const Operation& operation, std::vector<at::Tensor> tensors);

  // Fails the group on this rank's behalf.
  void Abort(const absl::Status& reason);

 private:
  C10dBackendGroup(c10::intrusive_ptr<c10d::Backend> backend,
                   std::unique_ptr<ReportExchange> reports, Options options);

  struct Kept;

  // How much longer the backend may take to let go.
  absl::Duration Patience();
  void AwaitLetGo(const C10dCompletion& completion);
  void CloseBackend();
  void EnterDevice();

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const Options options_;
  C10dCompletionQueue completions_;
  absl::Mutex mutex_;
  std::optional<absl::Time> closed_at_ ABSL_GUARDED_BY(mutex_);
  // The last, so that its threads end first.
  WatchedGroup watched_;
};

}  // namespace fsdp::comm

#endif  // COMM_C10D_BACKEND_C10D_BACKEND_GROUP_H_
