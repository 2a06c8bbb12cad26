// The JSON beside a file of tokens.
#ifndef EXAMPLES_LLAMA_DATA_TOKEN_DESCRIPTION_H_
#define EXAMPLES_LLAMA_DATA_TOKEN_DESCRIPTION_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace llama {

// What README.md says of it.
struct TokenDescription {
  int token_bytes = 1;
  int64_t num_tokens = 0;
  int64_t num_documents = 0;  // 0: nobody knows where they begin
  int64_t vocab_size = 256;   // tokens are less
  // With which each document begins and ends.
  std::optional<int64_t> bos_id;
  std::optional<int64_t> eos_id;
  std::string tokenizer_sha256;  // in hexadecimal; empty: tokens are bytes
};

// InvalidArgument: it is not what README.md says; Unimplemented: of a later
// version.
absl::StatusOr<TokenDescription> ParseTokenDescription(absl::string_view json);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_DESCRIPTION_H_
