// The data that a run trains on and is measured with.
#ifndef EXAMPLES_LLAMA_TRAINING_DATA_H_
#define EXAMPLES_LLAMA_TRAINING_DATA_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/data/window_rows.h"
#include "examples/llama/flags/train_flags.h"
#include "examples/llama/model/llama_config.h"

namespace llama {

// Opens NAME.bin as a file of tokens, anything else as bytes. InvalidArgument:
// tokens are not in the model's vocabulary, or were made by another tokenizer
// than `model_folder`/tokenizer.json, if that exists. Other errors are those of
// TokenFile.
absl::StatusOr<TokenFile> OpenTokens(const std::string& path,
                                     const std::string& model_folder,
                                     const LlamaConfig& config);

// Returns whether the first line of the file is a JSON object, whose braces and
// names would be trained on as text.
bool LooksLikeJsonLines(const std::string& path);

// Returns rows to train on: windows of the stream, or packed documents in an
// order that `seed` chooses. Errors are those of WindowRows and PackedRows.
absl::StatusOr<std::shared_ptr<const RowSource>> TrainingRows(
    const TokenFile& tokens, Rows rows, int64_t seq, uint64_t seed);

// Returns rows to measure with, which have every target.
absl::StatusOr<std::shared_ptr<const RowSource>> EvaluationRows(
    const TokenFile& tokens, Rows rows, int64_t seq);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_DATA_H_
