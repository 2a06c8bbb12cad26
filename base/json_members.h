// For large objects that are the member of an object.
#ifndef BASE_JSON_MEMBERS_H_
#define BASE_JSON_MEMBERS_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/json.h"

namespace fsdp {

// As Json::ParseMembers(), but where the member named `opened` is an object,
// its members are visited in turn as well: `visit` gets it without any, then
// `visit_opened` each of them. `max_values` holds for each. Memory: each key of
// the two objects, about 100 bytes, and what is visited.
absl::Status ParseMembers(
    absl::string_view text, absl::string_view opened, int64_t max_values,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit,
    absl::FunctionRef<absl::Status(std::string key, Json value)> visit_opened);

}  // namespace fsdp

#endif  // BASE_JSON_MEMBERS_H_
