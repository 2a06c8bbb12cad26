// Rows that say which they are, for tests.
#ifndef EXAMPLES_LLAMA_TESTING_NUMBERED_ROWS_H_
#define EXAMPLES_LLAMA_TESTING_NUMBERED_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "examples/llama/data/token_batches.h"

namespace llama {

// Row i has the tokens 10 * i + 1, 10 * i + 2, ..., targets that are 1 more
// and, if there are two, documents where it says.
class NumberedRows final : public RowSource {
 public:
  explicit NumberedRows(int64_t num_rows, int64_t seq = 2)
      : num_rows_(num_rows), seq_(seq) {}

  int64_t seq() const override { return seq_; }
  int64_t num_rows() const override { return num_rows_; }
  absl::Status Read(int64_t index, Row& row) const override {
    if (fails_) return absl::DataLossError("damaged");
    for (int64_t i = 0; i < seq_; ++i) {
      row.tokens.at(i) = 10 * index + 1 + i;
      row.targets.at(i) = 10 * index + 2 + i;
    }
    if (index % 2 == 1 && seq_ == 2) row.documents = {0, 1};
    return absl::OkStatus();
  }

  void set_fails(bool fails) { fails_ = fails; }

 private:
  const int64_t num_rows_, seq_;
  bool fails_ = false;
};

inline std::vector<int64_t> ValuesOf(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  const int64_t* const data = dense.const_data_ptr<int64_t>();
  return std::vector<int64_t>(data, data + dense.numel());
}

// Returns the numbers of rows in a tensor of tokens; -1 for padding.
inline std::vector<int64_t> NumbersOf(const at::Tensor& tokens) {
  std::vector<int64_t> numbers;
  for (int64_t token : ValuesOf(tokens.select(/*dim=*/1, 0))) {
    numbers.push_back(token == kPadding ? -1 : token / 10);
  }
  return numbers;
}

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TESTING_NUMBERED_ROWS_H_
