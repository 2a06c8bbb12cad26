// JSON values, parsed strictly (RFC 8259) and printed, and UTF-8. We have our
// own because it reads headers of many megabytes that strangers wrote: it
// refuses keys given twice and bytes that are not UTF-8, keeps 64 bits of an
// integer, and limits the memory of what is read (ParseMembers()). Libraries
// lack some of that, and would be one more dependency.
#ifndef BASE_JSON_H_
#define BASE_JSON_H_

#include <cstddef>
#include <cstdint>
#include <map>
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
  template <typename T>
  Json(const std::map<std::string, T>& members)  // NOLINT
      : value_(Object(members.begin(), members.end())) {}

  // Parses one JSON value. A number without fraction and exponent that fits is
  // an int64_t, any other a double. InvalidArgument names the byte: anything
  // else, invalid UTF-8, a key given twice, or nesting deeper than 64.
  static absl::StatusOr<Json> Parse(absl::string_view text);

  // Parses a large object: calls `visit` with one member after the other, so
  // that one is in memory at a time, and ends at the first error of `visit`. It
  // refuses what Parse() refuses, after visiting the members before it, a text
  // that is no object, and a member of more than `max_values` values. A value
  // takes up to 40 times the memory of its text.
  static absl::Status ParseMembers(
      absl::string_view text, int64_t max_values,
      absl::FunctionRef<absl::Status(std::string key, Json value)> visit);

  // Prints on one line. Doubles survive a round trip; those that are not
  // finite, which JSON lacks, become null. Bytes that are not UTF-8 become
  // U+FFFD.
  std::string ToString() const;

  // Returns the value if it is of type T (bool, int64_t, double, std::string,
  // Array, Object), else null.
  template <typename T>
  const T* As() const {
    return std::get_if<T>(&value_);
  }
  // Returns the member of that name; null if there is none or this is no
  // object.
  const Json* Find(absl::string_view key) const;
  // Returns the value of that member if it is of type T, else null.
  template <typename T>
  const T* FindAs(absl::string_view key) const {
    const Json* const member = Find(key);
    return member == nullptr ? nullptr : member->As<T>();
  }
  // Returns the value of a number of either kind, or `otherwise`.
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

// As Json::ParseMembers(), but if the member named `opened` is an object,
// `visit` gets it empty, and then `visit_opened` each of its members.
// `max_values` limits each. Memory: about 100 bytes and the key for each member
// of the two objects, and what is visited.
absl::Status ParseMembers(
    absl::string_view text, absl::string_view opened, int64_t max_values,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit_opened);

// Returns the length in bytes of the UTF-8 sequence that `text` begins with; 0
// if there is none.
size_t Utf8Length(absl::string_view text);

// Appends the character `code`, which is below 0x110000 and no half of a
// surrogate pair.
void AppendUtf8(unsigned code, std::string& out);

// Returns whether `text` is UTF-8, so that a JSON string can hold it unchanged.
bool IsUtf8(absl::string_view text);

}  // namespace fsdp

#endif  // BASE_JSON_H_
