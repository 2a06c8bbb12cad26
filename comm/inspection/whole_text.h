// Texts of several lines that others' lines do not come between, where the
// system can help it.
#ifndef COMM_INSPECTION_WHOLE_TEXT_H_
#define COMM_INSPECTION_WHOLE_TEXT_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp::comm {

// By as few calls of write(2) as it takes; drops what cannot be written.
void WriteWhole(int fd, absl::string_view text);

// To FOLDER/rank-RANK.txt; makes the file, and the folder if its parent is
// there. The error names the file.
absl::Status AppendForRank(const std::string& folder, int rank,
                           absl::string_view text);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_WHOLE_TEXT_H_
