// A Status as text that travels between ranks.
#ifndef COMM_GROUP_STATUS_TEXT_H_
#define COMM_GROUP_STATUS_TEXT_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp::comm {

// "9 the message".
std::string EncodeStatus(const absl::Status& status);

// nullopt for what EncodeStatus() does not write: no code, or one that is none.
std::optional<absl::Status> DecodeStatus(absl::string_view text);

}  // namespace fsdp::comm

#endif  // COMM_GROUP_STATUS_TEXT_H_
