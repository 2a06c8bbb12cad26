#include "tools/checkpoint/progress.h"

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr absl::Duration kPause = absl::Milliseconds(200);

}  // namespace

Progress::~Progress() {
  if (width_ > 0) out_ << "\n" << std::flush;
}

void Progress::Update(int64_t done, int64_t total) {
  const absl::Time now = now_();
  if (began_ == absl::InfinitePast()) began_ = now;
  if (now - written_ < kPause && done < total) return;
  written_ = now;
  const double seconds = absl::ToDoubleSeconds(now - began_);
  std::string line =
      absl::StrCat(what_, ": ", SizeText(done), " of ", SizeText(total));
  if (seconds > 0 && done > 0) {
    const double rate = static_cast<double>(done) / seconds;
    absl::StrAppendFormat(&line, ", %.2f GB/s, %.0f s left", rate / 1e9,
                          static_cast<double>(total - done) / rate);
  }
  const size_t width = line.size();
  line.resize(std::max(width, width_), ' ');
  width_ = width;
  out_ << "\r" << line << std::flush;
}

}  // namespace fsdp::checkpoint::tool
