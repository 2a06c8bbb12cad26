// Plain values as bytes, in the byte order of this machine.
#ifndef BASE_PLAIN_BYTES_H_
#define BASE_PLAIN_BYTES_H_

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace fsdp {

template <typename T>
void AppendValue(std::string& out, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Appends the number of values, and then these.
template <typename T>
void AppendList(std::string& out, absl::Span<const T> values) {
  static_assert(std::is_trivially_copyable_v<T>);
  AppendValue(out, static_cast<int64_t>(values.size()));
  out.append(reinterpret_cast<const char*>(values.data()),
             values.size() * sizeof(T));
}
inline void AppendText(std::string& out, absl::string_view text) {
  AppendList(out, absl::MakeConstSpan(text.data(), text.size()));
}

// Takes off the front of bytes what these have appended. What goes past the end
// is 0 or empty, and so is all after it; ok() is false then.
class BytesReader {
 public:
  // `bytes` outlive it.
  explicit BytesReader(absl::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T Take() {
    T value{};
    const absl::string_view bytes = TakeBytes(sizeof(T));
    if (ok_) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  template <typename T>
  std::vector<T> TakeList() {
    constexpr int64_t kItem = sizeof(T);
    const auto count = Take<int64_t>();
    const bool fits = count >= 0 && count <= left() / kItem;
    const absl::string_view bytes = TakeBytes(fits ? count * kItem : -1);
    std::vector<T> values(bytes.size() / kItem);
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  absl::string_view TakeText() { return TakeBytes(Take<int64_t>()); }
  absl::string_view TakeBytes(int64_t size) {
    ok_ = ok_ && size >= 0 && size <= left();
    if (!ok_) return {};
    absl::string_view front = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return front;
  }

  bool ok() const { return ok_; }
  int64_t left() const { return static_cast<int64_t>(bytes_.size()); }

 private:
  absl::string_view bytes_;
  bool ok_ = true;
};

}  // namespace fsdp

#endif  // BASE_PLAIN_BYTES_H_
