// Memory that processes of a simulation have in common, and when each of them
// sees what others write to it.
#ifndef TESTING_SIMULATION_COMMON_MEMORIES_H_
#define TESTING_SIMULATION_COMMON_MEMORIES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

// With late visibility each process has its own copy. What a process has
// changed before Release() is in another's copy after that one's Acquire() at
// the latest; before, it may be seen or not. Two processes that change the same
// byte, neither having seen the other's change, are a violation.
class CommonMemories {
 public:
  // The changes that a process has written or seen, by memory and by member.
  using Clock = std::vector<std::vector<size_t>>;

  explicit CommonMemories(Simulation& simulation) : simulation_(simulation) {}
  CommonMemories(const CommonMemories&) = delete;
  CommonMemories& operator=(const CommonMemories&) = delete;
  ~CommonMemories();

  // Returns the memory as each of `processes` sees it, zeros.
  std::vector<at::Tensor> Allocate(int64_t bytes, std::vector<int> processes,
                                   bool late_visibility);

  bool Contains(const void* data) const;
  // Tells that a collective has written these bytes for `process`.
  void Delivered(int process, const void* data, size_t bytes);

  Clock Release(int process);
  void Acquire(int process, const Clock& clock);

 private:
  struct Change {
    size_t offset;
    std::string bytes;
  };
  struct Memory {
    size_t bytes = 0;
    std::vector<int> processes;                // by member
    std::vector<char*> copies;                 // by member
    std::vector<std::string> seen;             // by member, as last compared
    std::vector<std::vector<Change>> changes;  // by member
    // How many of each other member's changes a member's copy has.
    std::vector<std::vector<size_t>> known;
  };

  static int MemberOf(const Memory& memory, int process);
  void NoteChanges(Memory& memory, int member);
  void Apply(Memory& memory, int member, int writer, const Change& change);

  Simulation& simulation_;
  std::vector<Memory> memories_;  // only those with copies
  std::vector<void*> allocated_;
  std::vector<size_t> sizes_;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_COMMON_MEMORIES_H_
