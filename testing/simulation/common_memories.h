// Memory that the processes of a simulation have in common, and when each of
// them sees what others write to it.
#ifndef TESTING_SIMULATION_COMMON_MEMORIES_H_
#define TESTING_SIMULATION_COMMON_MEMORIES_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "testing/simulation/simulation.h"

namespace fsdp::simulation {

// With late visibility each process has a copy of its own. What it has changed
// goes to another one's copy when that process does what makes it visible at
// the latest (Acquire()) behind what the first has done (Release()); before, it
// may be seen or not. Two that change the same byte with neither of them having
// seen the other's are a violation.
class CommonMemories {
 public:
  // What a process had written and seen: by memory, by member.
  using Clock = std::vector<std::vector<size_t>>;

  explicit CommonMemories(Simulation& simulation) : simulation_(simulation) {}
  CommonMemories(const CommonMemories&) = delete;
  CommonMemories& operator=(const CommonMemories&) = delete;
  ~CommonMemories();

  // That of each of `processes`, zeros.
  std::vector<at::Tensor> Allocate(int64_t bytes, std::vector<int> processes,
                                   bool late_visibility);

  bool Contains(const void* data) const;
  // A collective has written these bytes for `process`.
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
    std::vector<int> processes;                // of the members
    std::vector<char*> copies;                 // by member
    std::vector<std::string> seen;             // as last compared
    std::vector<std::vector<Change>> changes;  // by member
    // What a member's copy has of others' changes.
    std::vector<std::vector<size_t>> known;
  };

  static int MemberOf(const Memory& memory, int process);
  void NoteChanges(Memory& memory, int member);
  void Apply(Memory& memory, int member, int writer, const Change& change);

  Simulation& simulation_;
  std::vector<Memory> memories_;  // those with copies
  std::vector<void*> allocated_;
  std::vector<size_t> sizes_;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_COMMON_MEMORIES_H_
