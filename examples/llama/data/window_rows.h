// A file of tokens as one stream, cut into windows.
#ifndef EXAMPLES_LLAMA_DATA_WINDOW_ROWS_H_
#define EXAMPLES_LLAMA_DATA_WINDOW_ROWS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "examples/llama/data/row_source.h"
#include "examples/llama/data/token_file.h"

namespace llama {

// What is left over where no whole window fits any more.
enum class LastWindow {
  kLeftOut,  // up to seq tokens are no target
  kPadded,
};

// Row i has the tokens from i * seq on, and one more as the last target, so
// that every token but the first is a target once.
class WindowRows final : public RowSource {
 public:
  // InvalidArgument: seq < 1, or too few tokens for one row.
  static absl::StatusOr<std::shared_ptr<const WindowRows>> Create(
      TokenFile file, int64_t seq, LastWindow last);

  int64_t seq() const override { return seq_; }
  int64_t num_rows() const override { return num_rows_; }
  absl::Status Read(int64_t index, Row& row) const override;

 private:
  WindowRows(TokenFile file, int64_t seq, int64_t num_rows);

  const TokenFile file_;
  const int64_t seq_;
  const int64_t num_rows_;
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_WINDOW_ROWS_H_
