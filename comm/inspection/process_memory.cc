#include "comm/inspection/process_memory.h"

#include <fstream>
#include <iterator>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace fsdp::comm {
namespace {

// Parses what follows the colon in "VmRSS:    1234 kB".
std::optional<int64_t> Kilobytes(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  int64_t value = 0;
  if (!absl::ConsumeSuffix(&text, " kB") || !absl::SimpleAtoi(text, &value)) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

std::optional<ProcessMemory> ParseProcessMemory(absl::string_view status) {
  std::optional<int64_t> resident;
  std::optional<int64_t> peak;
  for (absl::string_view line : absl::StrSplit(status, '\n')) {
    if (absl::ConsumePrefix(&line, "VmRSS:")) resident = Kilobytes(line);
    if (absl::ConsumePrefix(&line, "VmHWM:")) peak = Kilobytes(line);
  }
  if (!resident || !peak) return std::nullopt;
  return ProcessMemory{*resident << 10, *peak << 10};
}

std::optional<ProcessMemory> ReadProcessMemory() {
  std::ifstream file("/proc/self/status");
  const std::string text((std::istreambuf_iterator<char>(file)),
                         std::istreambuf_iterator<char>());
  return ParseProcessMemory(text);
}

std::string BytesText(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) {
    return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1 << 30));
  }
  if (bytes >= 1 << 20) {
    return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  }
  return absl::StrCat(bytes >> 10, " KiB");
}

}  // namespace fsdp::comm
