// How the tool prints names, sizes and tables.
#ifndef TOOLS_CHECKPOINT_TEXT_H_
#define TOOLS_CHECKPOINT_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp::checkpoint::tool {

// "4.90 MB"; "123 B" below 1,000.
std::string SizeText(int64_t bytes);
// "1,234,567".
std::string Thousands(int64_t number);
// "1 file", "2 files".
std::string Count(int64_t number, absl::string_view noun);
// Names come out of files: without what a terminal would obey.
std::string Printable(absl::string_view name);

// Lines of cells in columns, each line after `indent` spaces. `alignment` has
// 'l' or 'r' for each column; rows may have fewer cells.
std::string Columns(const std::vector<std::vector<std::string>>& rows,
                    absl::string_view alignment, int indent = 2);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TEXT_H_
