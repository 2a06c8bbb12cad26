// Writes pickles.
#ifndef CHECKPOINT_PICKLE_PICKLER_H_
#define CHECKPOINT_PICKLE_PICKLER_H_

#include <cstdint>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

// One opcode a call, in the order of the pickle: values go onto the stack of
// the machine that will read it, and the rest takes them from there. Equal
// texts and equal names of globals are written once and referred to. The same
// calls make the same bytes.
class Pickler {
 public:
  // 2, as torch.save() writes, or 4.
  explicit Pickler(int protocol);

  void None();
  void Bool(bool value);
  void Int(int64_t value);
  void Double(double value);
  // UTF-8.
  void String(absl::string_view text);
  // Protocol 4 alone.
  void Bytes(absl::string_view bytes);
  // Pushes a name: ("torch", "Size").
  void Global(absl::string_view module, absl::string_view name);

  void Mark();
  void Tuple();  // of all since the mark
  void EmptyTuple();
  void EmptyList();
  void Appends();  // all since the mark to the list before it
  void EmptyDict();
  void SetItems();  // all since the mark: a key, its value, ...

  void Reduce();        // (global, tuple of arguments): calls it
  void NewObj();        // (class, tuple of arguments): makes one
  void Build();         // (object, state)
  void PersistentId();  // (id)

  // The pickle of the one value that is on the stack; the last call.
  std::string Finish() &&;

 private:
  void Op(uint8_t op) { bytes_.push_back(static_cast<char>(op)); }
  void LittleEndian(uint64_t value, int bytes);
  // A reference to what was memoised as `key`, else false.
  bool Remembered(absl::string_view key);
  void Remember(absl::string_view key);
  // A text of the pickle's protocol.
  void RawString(absl::string_view text);

  const int protocol_;
  std::string bytes_;
  absl::flat_hash_map<std::string, uint32_t> memo_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_PICKLE_PICKLER_H_
