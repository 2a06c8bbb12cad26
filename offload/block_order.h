// Lets transfers of the same block happen in the order in which they came.
#ifndef OFFLOAD_BLOCK_ORDER_H_
#define OFFLOAD_BLOCK_ORDER_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "base/check.h"

namespace fsdp::offload {

// Reads of a block run together, a write alone; nobody overtakes. `User` says
// by `bool writes` what it does. Thread-compatible.
template <typename User>
class BlockOrder {
 public:
  // Whether `user` may start now; if not, a Leave() will name it.
  bool Enter(const void* block, User* user) {
    Line& line = lines_[block];
    if (line.waiting.empty() && line.Admits(*user)) {
      line.Admit(*user);
      return true;
    }
    line.waiting.push_back(user);
    return false;
  }

  // `user` had started; those that may start now are added to `next`.
  void Leave(const void* block, const User& user, std::vector<User*>& next) {
    const auto found = lines_.find(block);
    FSDP_CHECK(found != lines_.end());
    Line& line = found->second;
    line.Release(user);
    while (!line.waiting.empty() && line.Admits(*line.waiting.front())) {
      line.Admit(*line.waiting.front());
      next.push_back(line.waiting.front());
      line.waiting.pop_front();
    }
    if (!line.writing && line.reading == 0) lines_.erase(found);
  }

  bool empty() const { return lines_.empty(); }

 private:
  struct Line {
    bool Admits(const User& user) const {
      return !writing && !(user.writes && reading > 0);
    }
    void Admit(const User& user) {
      if (user.writes) {
        writing = true;
      } else {
        ++reading;
      }
    }
    void Release(const User& user) {
      if (user.writes) {
        writing = false;
      } else {
        --reading;
      }
    }

    bool writing = false;
    int64_t reading = 0;
    std::deque<User*> waiting;
  };

  // Only blocks that somebody uses have one.
  absl::flat_hash_map<const void*, Line> lines_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_BLOCK_ORDER_H_
