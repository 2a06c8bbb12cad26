// Which collectives a rank has started, in order, for comparison between ranks.
#ifndef FSDP_RUNTIME_ORDER_LOG_H_
#define FSDP_RUNTIME_ORDER_LOG_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/schedule/schedule.h"

namespace fsdp {

class OrderLog {
 public:
  // `kind`: kGather, kReduce or kReplicate. `label` outlives this object.
  void Add(ActionKind kind, int unit, const std::string& label, int64_t bytes,
           c10::ScalarType dtype);
  void Clear();

  // Of all since Clear(). Equal orders have equal hashes on all ranks.
  uint64_t hash() const { return hash_; }
  // A line for each with label, bytes and dtype; of very many, as where only
  // forwards run, for the first ones.
  std::string ToString() const;

 private:
  static constexpr size_t kKept = 10'000;
  static constexpr uint64_t kNothing = 0xcbf29ce484222325;

  struct Entry {
    ActionKind kind;
    const std::string* label;
    int64_t bytes;
    c10::ScalarType dtype;
  };

  uint64_t hash_ = kNothing;  // FNV-1a over words
  uint64_t count_ = 0;
  std::vector<Entry> first_;
};

}  // namespace fsdp

#endif  // FSDP_RUNTIME_ORDER_LOG_H_
