#include "testing/interleavings/trace.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "testing/interleavings/mutation.h"

namespace fsdp::interleavings {
namespace {

bool LooksAgain(const TraceLine& a, const TraceLine& b) {
  return a.thread == b.thread && a.what == b.what && a.offset == b.offset &&
         a.value == b.value && a.site == b.site;
}

}  // namespace

std::string ToString(const Trace& trace, const Arena& arena) {
  std::string text;
  const TraceLine* previous = nullptr;
  for (const TraceLine& line : trace) {
    if (previous != nullptr && LooksAgain(*previous, line)) continue;
    previous = &line;
    absl::StrAppend(&text, "  ");
    if (line.thread >= 0) {
      absl::StrAppend(&text, "thread ", line.thread, " (rank ", line.rank,
                      ") ");
    }
    absl::StrAppend(&text, line.what);
    if (line.in_arena) {
      absl::StrAppend(&text, " ", arena.FullNameOf(line.offset), ": ",
                      line.value, line.is_old ? ", not the newest" : "");
    }
    if (line.site != 0) {
      absl::StrAppend(&text, "  [", FunctionAt(line.site), "]");
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

}  // namespace fsdp::interleavings
