// The data plane of FSDP: carries out the actions of a Schedule on flat
// parameters, unsharded memory and a communicator.
#ifndef FSDP_RUNTIME_H_
#define FSDP_RUNTIME_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/buffer_pool.h"
#include "fsdp/gradient_buffer.h"
#include "fsdp/schedule.h"

namespace fsdp {

// A unit's flat parameters, one per dtype; none for a root that owns nothing.
struct RuntimeUnit {
  std::string name;
  std::vector<std::unique_ptr<flat_param::FlatParameter>> flats;
};

// Of one rank. `parameters` is memory of gathered parameters, `gradients` of
// reduce buffers; shards are not counted.
struct MemoryStats {
  BufferPool::Stats parameters;
  BufferPool::Stats gradients;
};

// Decides nothing. Not thread-safe.
class Runtime {
 public:
  // `timeout`: for each wait.
  Runtime(std::shared_ptr<comm::Communicator> communicator,
          std::vector<RuntimeUnit> units, absl::Duration timeout);

  int num_units() const { return static_cast<int>(units_.size()); }
  const std::string& name(int unit) const { return units_[unit].name; }
  absl::Span<const std::unique_ptr<flat_param::FlatParameter>> flats(
      int unit) const {
    return units_[unit].flats;
  }
  comm::Communicator& communicator() { return *communicator_; }
  absl::Duration timeout() const { return timeout_; }

  // Carries out `actions` in order up to the first that fails. `gradients`:
  // for kFillReduceBuffer, of the unit's parameters, flat after flat.
  absl::Status Execute(absl::Span<const Action> actions,
                       absl::Span<const at::Tensor> gradients = {});

  // After an error: gives all unsharded memory back and forgets what is in
  // flight, waiting for none of it. The parameters are empty afterwards.
  void DropEverything();

  MemoryStats memory_stats() const {
    return {parameter_memory_.stats(), gradient_memory_.stats()};
  }

 private:
  struct Flat {
    std::string label;  // in collectives: the unit, and the dtype where needed
    flat_param::FlatParameter* parameter;
    GradientBuffer gradient_buffer;
    at::Tensor memory;                   // of a gather, in flight or done
    std::unique_ptr<comm::Work> gather;  // in flight
  };
  struct Reduction {
    int unit;
    std::vector<at::Tensor> memory;  // per flat
    std::vector<std::unique_ptr<comm::Work>> works;
  };

  absl::Status ExecuteOne(const Action& action,
                          absl::Span<const at::Tensor> gradients);
  absl::Status Gather(int unit);
  absl::Status WaitGather(int unit);
  void Free(int unit);
  absl::Status FillReduceBuffer(int unit,
                                absl::Span<const at::Tensor> gradients);
  absl::Status Reduce(int unit);
  absl::Status WaitReduce(int unit);
  absl::Time Deadline() const { return absl::Now() + timeout_; }

  const std::shared_ptr<comm::Communicator> communicator_;
  const std::vector<RuntimeUnit> units_;
  const absl::Duration timeout_;
  std::vector<std::vector<Flat>> flats_;  // per unit
  std::deque<Reduction> reductions_;      // filled or in flight, oldest first
  BufferPool parameter_memory_;
  BufferPool gradient_memory_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_H_
