// How far a long command is, for people who watch.
#ifndef TOOLS_CHECKPOINT_PROGRESS_H_
#define TOOLS_CHECKPOINT_PROGRESS_H_

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "absl/time/time.h"

namespace fsdp::checkpoint::tool {

// Told now and then how many bytes of how many are done; may be null.
using OnBytes = std::function<void(int64_t done, int64_t total)>;

// One line that is written over: "verify: 1.20 GB of 4.80 GB, 1.83 GB/s, 2 s
// left". Used by one thread.
class Progress {
 public:
  Progress(std::ostream& out, std::string what, std::function<absl::Time()> now)
      : out_(out), what_(std::move(what)), now_(std::move(now)) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();  // ends the line

  // Writes at most five times a second, and at the end.
  void Update(int64_t done, int64_t total);

 private:
  std::ostream& out_;
  const std::string what_;
  const std::function<absl::Time()> now_;
  absl::Time began_ = absl::InfinitePast();
  absl::Time written_ = absl::InfinitePast();
  size_t width_ = 0;  // of the line
};

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_PROGRESS_H_
