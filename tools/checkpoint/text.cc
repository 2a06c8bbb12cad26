#include "tools/checkpoint/text.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace fsdp::checkpoint::tool {

std::string SizeText(int64_t bytes) {
  constexpr absl::string_view kUnits[] = {"kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return absl::StrCat(bytes, " B");
  double size = static_cast<double>(bytes) / 1000;
  size_t unit = 0;
  while (size >= 999.995 && unit + 1 < std::size(kUnits)) {
    size /= 1000;
    ++unit;
  }
  return absl::StrFormat("%.2f %s", size, kUnits[unit]);
}

std::string Thousands(int64_t number) {
  std::string text = absl::StrCat(number);
  const size_t first = number < 0 ? 1 : 0;
  for (size_t at = text.size(); at > first + 3;) {
    at -= 3;
    text.insert(at, ",");
  }
  return text;
}

std::string Count(int64_t number, absl::string_view noun) {
  return absl::StrCat(Thousands(number), " ", noun, number == 1 ? "" : "s");
}

std::string Printable(absl::string_view name) {
  // Quotes do no harm.
  return absl::StrReplaceAll(absl::Utf8SafeCHexEscape(name),
                             {{"\\\\", "\\\\"}, {"\\\"", "\""}, {"\\'", "'"}});
}

std::string Columns(const std::vector<std::vector<std::string>>& rows,
                    absl::string_view alignment, int indent) {
  std::vector<size_t> widths(alignment.size(), 0);
  for (const std::vector<std::string>& row : rows) {
    for (size_t i = 0; i < row.size() && i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows) {
    std::string line(static_cast<size_t>(indent), ' ');
    for (size_t i = 0; i < row.size() && i < widths.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      absl::StrAppend(&line, i > 0 ? "  " : "",
                      alignment[i] == 'r' ? space : "", row[i],
                      alignment[i] == 'r' ? "" : space);
    }
    absl::StripTrailingAsciiWhitespace(&line);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

}  // namespace fsdp::checkpoint::tool
