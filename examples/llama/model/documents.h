// Rows of tokens with several documents in each.
#ifndef EXAMPLES_LLAMA_MODEL_DOCUMENTS_H_
#define EXAMPLES_LLAMA_MODEL_DOCUMENTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace llama {

// The beginnings of documents: ascending indices into all tokens of a batch,
// row by row. {0, 3, 8, 10} are two documents in each of two rows of 8 tokens.
// Padding at the end of a row counts as a document. Empty: every row is one
// document.
using DocumentStarts = std::vector<int64_t>;

// InvalidArgument: they do not ascend, are outside of the `rows` x `tokens`, or
// a row does not begin with a document.
absl::Status CheckDocumentStarts(absl::Span<const int64_t> starts, int64_t rows,
                                 int64_t tokens);

// Returns the number of tokens of each document, of `all` tokens.
std::vector<int64_t> DocumentLengths(absl::Span<const int64_t> starts,
                                     int64_t all);
// Returns the position in its document of each of `all` tokens.
std::vector<int64_t> DocumentPositions(absl::Span<const int64_t> starts,
                                       int64_t all);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_DOCUMENTS_H_
