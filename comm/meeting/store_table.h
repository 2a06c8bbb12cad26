// The keys and values of a job's store.
#ifndef COMM_MEETING_STORE_TABLE_H_
#define COMM_MEETING_STORE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp::comm {

// What c10d's stores do with their keys. Not thread-safe.
class StoreTable {
 public:
  // ResourceExhausted instead of more than `max_bytes` of keys and values.
  explicit StoreTable(size_t max_bytes = size_t{256} << 20)
      : max_bytes_(max_bytes) {}

  absl::Status Set(const std::string& key, std::string value);
  // Sets `value` where the key has `expected`, or where there is no such key
  // and `expected` is empty. What the key has then; `expected` where there is
  // none.
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            std::string value);
  // To a decimal number, 0 where there is none. InvalidArgument: the key has
  // something else, or the sum does not fit into 64 bits.
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend);
  bool Delete(const std::string& key);
  // All keys that begin with `prefix`; how many there were.
  int64_t DeleteAll(absl::string_view prefix);

  // Null: there is none. Valid until the table changes.
  const std::string* Find(const std::string& key) const;
  // The first of `keys` that is not there; null: all are.
  const std::string* FirstMissing(const std::vector<std::string>& keys) const;
  size_t size() const { return values_.size(); }

  // The keys that have come since the last call.
  std::vector<std::string> TakeNewKeys() {
    return std::exchange(new_keys_, {});
  }

 private:
  const size_t max_bytes_;
  size_t bytes_ = 0;
  std::unordered_map<std::string, std::string> values_;
  std::vector<std::string> new_keys_;
};

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_TABLE_H_
