// JSON values: strict parsing (RFC 8259) and printing. Our own, since it reads
// headers that strangers wrote, of many megabytes: keys that are given twice
// and bytes that are not UTF-8 are refused, 64 bits of an integer are kept, and
// the memory of what is read has a limit (ParseMembers()). Libraries lack some
// of it, and would be one more dependency.
#ifndef BASE_JSON_H_
#define BASE_JSON_H_

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// A value type; thread-compatible.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  // keeps the order

  Json() : value_(nullptr) {}
  Json(bool value) : value_(value) {}                          // NOLINT
  Json(double value) : value_(value) {}                        // NOLINT
  Json(std::string value) : value_(std::move(value)) {}        // NOLINT
  Json(absl::string_view value) : Json(std::string(value)) {}  // NOLINT
  Json(const char* value) : Json(std::string(value)) {}        // NOLINT
  Json(Array value) : value_(std::move(value)) {}              // NOLINT
  Json(Object value) : value_(std::move(value)) {}             // NOLINT
  template <typename T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
  Json(T value) : value_(static_cast<int64_t>(value)) {}  // NOLINT
  template <typename T>
  Json(const std::vector<T>& values)  // NOLINT
      : value_(Array(values.begin(), values.end())) {}

  // InvalidArgument, naming the byte, for anything but one JSON value: also for
  // invalid UTF-8, keys given twice and nesting deeper than 64. A number
  // without fraction and exponent that fits is an int64_t, any other a double.
  static absl::StatusOr<Json> Parse(absl::string_view text);

  // For large objects: calls `visit` with each member in turn, so that one of
  // them is held at a time, and ends at its first error. What Parse() refuses
  // is refused, with members before it visited; also a text that is no object,
  // and a member of more than `max_values` values, each of which takes about 40
  // times as much memory as the shortest takes text.
  static absl::Status ParseMembers(
      absl::string_view text, int64_t max_values,
      absl::FunctionRef<absl::Status(std::string key, Json value)> visit);

  // On one line. Doubles survive a round trip; those that are not finite, which
  // JSON cannot say, become null. Bytes that are not UTF-8 become U+FFFD.
  std::string ToString() const;

  // The value if it is of type T (bool, int64_t, double, std::string, Array,
  // Object), else null.
  template <typename T>
  const T* As() const {
    return std::get_if<T>(&value_);
  }
  // The member of that name; null if there is none or this is no object.
  const Json* Find(absl::string_view key) const;
  // The value of a number of either kind; `otherwise` for anything else.
  double NumberOr(double otherwise) const;

  friend bool operator==(const Json& a, const Json& b) {
    return a.value_ == b.value_;
  }

 private:
  void AppendTo(std::string& out) const;

  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array,
               Object>
      value_;
};

// For large objects that are the member of an object.

// As Json::ParseMembers(), but where the member named `opened` is an object,
// its members are visited in turn as well: `visit` gets it without any, then
// `visit_opened` each of them. `max_values` holds for each. Memory: each key of
// the two objects, about 100 bytes, and what is visited.
absl::Status ParseMembers(
    absl::string_view text, absl::string_view opened, int64_t max_values,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit_opened);

}  // namespace fsdp

#endif  // BASE_JSON_H_
