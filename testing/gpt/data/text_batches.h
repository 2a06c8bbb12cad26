// Windows of a text as batches of byte tokens.
#ifndef TESTING_GPT_DATA_TEXT_BATCHES_H_
#define TESTING_GPT_DATA_TEXT_BATCHES_H_

#include <ATen/core/Generator.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "testing/gpt/data/batch.h"

namespace gpt {

// Returns the windows of `text` that begin at `starts`, each of seq + 1 bytes.
Batch WindowsAt(absl::string_view text, absl::Span<const int64_t> starts,
                int64_t seq);

// Windows at random places of a text, which must outlive it.
class RandomWindows final : public BatchSource {
 public:
  // `text` has more than shape.seq bytes.
  RandomWindows(absl::string_view text, BatchShape shape, uint64_t seed);

  Batch Next() override;

 private:
  const absl::string_view text_;
  const BatchShape shape_;
  at::Generator generator_;
};

// Returns `rank`'s batches of `num_windows` windows that are spread evenly over
// `text`; the ranks together have each once. Ranks have equal numbers of
// batches: if num_windows is not a multiple of world_size * shape.batch, the
// last windows are left out.
std::vector<Batch> EvenWindows(absl::string_view text, BatchShape shape,
                               int64_t num_windows, int rank, int world_size);

}  // namespace gpt

#endif  // TESTING_GPT_DATA_TEXT_BATCHES_H_
