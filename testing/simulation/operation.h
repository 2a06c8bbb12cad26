// One collective of a simulated group: who has called, and when bytes move.
#ifndef TESTING_SIMULATION_OPERATION_H_
#define TESTING_SIMULATION_OPERATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "testing/simulation/common_memories.h"
#include "testing/simulation/network.h"
#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

// The tensors that one rank brings to a collective.
struct Buffers {
  at::Tensor out;
  at::Tensor in;  // `out` if the collective is in place
  std::optional<comm::ScaledSum> scaled;
};

struct OperationContext {
  Simulation* simulation;
  const NetworkOptions* options;
  CommonMemories* memories;
  std::vector<int> processes;  // by rank
};

// Owns its buffers until it is done: it fills what it will write with values
// that nobody should read, and it is a violation of the contract to give up
// memory, or to change what it still reads and Drop() does not allow.
class Operation : public std::enable_shared_from_this<Operation> {
 public:
  Operation(OperationContext context, int64_t sequence);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Takes the one `call` of this rank, and starts what can be started.
  // `in_front` is an operation that sums into the same output, or null.
  void Enter(int rank, const comm::Call& call, comm::ReduceOp op, int root,
             const Buffers& buffers, std::shared_ptr<Operation> in_front);
  // From then on nothing moves from or to this rank.
  void Cancel(int rank);
  // This rank will not wait: it may write what is only gathered from, or goes
  // all to all, if no other rank waits.
  void Drop(int rank);
  // Nobody gets what this rank has not sent yet.
  void Lose(int rank) { sides_[rank].lost = true; }

  int64_t sequence() const { return sequence_; }
  const std::optional<comm::Call>& call(int rank) const {
    return sides_[rank].call;
  }
  bool has_result(int rank) const { return sides_[rank].has_result; }
  bool is_done(int rank) const { return sides_[rank].done; }
  bool is_lost(int rank) const { return sides_[rank].lost; }
  bool all_entered() const { return entered_ == sides_.size(); }
  // Returns whether it still has to write a scaled sum to `out`.
  bool SumsInto(int rank, const void* out) const;
  // Makes visible what this rank has to see when its call is done.
  void Acquire(int rank);

 private:
  struct Memory {
    at::Tensor tensor;
    char* data = nullptr;
    size_t bytes = 0;
  };
  struct Side {
    std::optional<comm::Call> call;
    Memory out;
    Memory in;
    std::optional<comm::ScaledSum> scaled;
    std::shared_ptr<Operation> in_front;
    bool in_place = false;  // `in` and `out` are the same tensor
    uint64_t in_hash = 0;
    std::vector<char> before;  // of `out`
    std::vector<char> taken;   // `in`, if it was read at once
    CommonMemories::Clock clock;
    bool launched = false;
    bool cancelled = false;
    bool lost = false;
    bool may_write = false;  // to `in`
    size_t reads = 0;
    bool has_result = false;
    bool done = false;
  };

  static Memory MemoryOf(const at::Tensor& tensor);
  void Violation(int rank, absl::string_view text);
  // Checks that the memory that was given is still there.
  void CheckMemory(int rank, const Memory& memory);
  static bool IsSlice(const Side& side);
  bool IsThereAlready(const Side& side) const;
  void Poison(Side& side);
  static void OverwriteInput(const Side& side);
  uint64_t HashInput(int rank) const;

  bool CanLaunch(int rank) const;
  void Launch(int rank);
  bool Reads(int reader, int source) const;
  // Returns `source`'s input from byte `offset` on.
  const char* InputOf(int source, size_t offset);
  std::vector<char> Compute(int rank);
  std::vector<char> ComputeSum(int rank, size_t slot_bytes);
  void ReadFor(int rank);
  void WriteTo(int rank, std::vector<char> result);
  void MaybeDone(int rank);
  // Notes a violation if the rank has changed what it brought.
  void CheckInput(int rank, absl::string_view when);

  const OperationContext context_;
  const int64_t sequence_;
  const bool takes_at_start_;
  const bool reads_at_end_;
  std::vector<Side> sides_;
  size_t entered_ = 0;
  std::optional<int> spoilt_by_;  // the rank that changed what it had dropped
  bool is_awaited_ = false;
  bool never_ends_ = false;  // a rank was cancelled before all had called
  comm::ReduceOp op_ = comm::ReduceOp::kSum;
  int root_ = 0;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_OPERATION_H_
