#include "testing/simulation/common_memories.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace fsdp::simulation {
namespace {

constexpr size_t kPage = 4096;

char* AllocatePages(size_t bytes) {
  const size_t whole = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  void* const memory = std::aligned_alloc(kPage, whole);
  FSDP_CHECK(memory != nullptr);
  std::memset(memory, 0, whole);
  return static_cast<char*>(memory);
}

}  // namespace

CommonMemories::~CommonMemories() {
  for (void* const memory : allocated_) std::free(memory);
}

std::vector<at::Tensor> CommonMemories::Allocate(int64_t bytes,
                                                 std::vector<int> processes,
                                                 bool late_visibility) {
  const auto size = static_cast<size_t>(bytes);
  const size_t members = processes.size();
  Memory memory;
  memory.bytes = size;
  memory.processes = std::move(processes);
  std::vector<at::Tensor> tensors;
  for (size_t member = 0; member < members; ++member) {
    if (member == 0 || late_visibility) {
      allocated_.push_back(AllocatePages(size));
      sizes_.push_back(size);
    }
    char* const copy = static_cast<char*>(allocated_.back());
    memory.copies.push_back(copy);
    memory.seen.emplace_back(size, '\0');
    tensors.push_back(
        at::from_blob(copy, {bytes}, at::TensorOptions().dtype(at::kByte)));
  }
  memory.changes.resize(members);
  memory.known.assign(members, std::vector<size_t>(members, 0));
  if (late_visibility) memories_.push_back(std::move(memory));
  return tensors;
}

bool CommonMemories::Contains(const void* data) const {
  for (size_t i = 0; i < allocated_.size(); ++i) {
    const char* const begin = static_cast<const char*>(allocated_[i]);
    if (data >= begin && data < begin + sizes_[i]) return true;
  }
  return false;
}

int CommonMemories::MemberOf(const Memory& memory, int process) {
  const auto found =
      std::find(memory.processes.begin(), memory.processes.end(), process);
  return found == memory.processes.end()
             ? -1
             : static_cast<int>(found - memory.processes.begin());
}

void CommonMemories::Delivered(int process, const void* data, size_t bytes) {
  for (Memory& memory : memories_) {
    const int member = MemberOf(memory, process);
    if (member < 0) continue;
    const char* const begin = static_cast<const char*>(data);
    const char* const copy = memory.copies[member];
    if (begin < copy || begin >= copy + memory.bytes) continue;
    std::memcpy(&memory.seen[member][begin - copy], data, bytes);
  }
}

void CommonMemories::NoteChanges(Memory& memory, int member) {
  const char* const now = memory.copies[member];
  std::string& seen = memory.seen[member];
  for (size_t i = 0; i < memory.bytes; ++i) {
    if (now[i] == seen[i]) continue;
    size_t end = i + 1;
    while (end < memory.bytes && now[end] != seen[end]) ++end;
    memory.changes[member].push_back({i, std::string(now + i, end - i)});
    i = end;
  }
  seen.assign(now, memory.bytes);
  memory.known[member][member] = memory.changes[member].size();
}

CommonMemories::Clock CommonMemories::Release(int process) {
  Clock clock(memories_.size());
  for (size_t i = 0; i < memories_.size(); ++i) {
    const int member = MemberOf(memories_[i], process);
    if (member < 0) continue;
    NoteChanges(memories_[i], member);
    clock[i] = memories_[i].known[member];
  }
  return clock;
}

void CommonMemories::Acquire(int process, const Clock& clock) {
  for (size_t i = 0; i < clock.size(); ++i) {
    Memory& memory = memories_[i];
    const int member = MemberOf(memory, process);
    if (member < 0) continue;
    for (size_t writer = 0; writer < clock[i].size(); ++writer) {
      size_t& known = memory.known[member][writer];
      for (; known < clock[i][writer]; ++known) {
        Apply(memory, member, static_cast<int>(writer),
              memory.changes[writer][known]);
      }
    }
  }
}

void CommonMemories::Apply(Memory& memory, int member, int writer,
                           const Change& change) {
  char* const target = memory.copies[member] + change.offset;
  char* const seen = &memory.seen[member][change.offset];
  const size_t bytes = change.bytes.size();
  if (std::memcmp(target, seen, bytes) != 0 &&
      std::memcmp(target, change.bytes.data(), bytes) != 0) {
    simulation_.Violation(absl::StrCat(
        "ranks ", memory.processes[member], " and ", memory.processes[writer],
        " have written to the same common memory, in no order"));
  }
  std::memcpy(target, change.bytes.data(), bytes);
  std::memcpy(seen, change.bytes.data(), bytes);
}

}  // namespace fsdp::simulation
