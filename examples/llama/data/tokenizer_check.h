// Checks that tokens were made by a model's tokenizer.
#ifndef EXAMPLES_LLAMA_DATA_TOKENIZER_CHECK_H_
#define EXAMPLES_LLAMA_DATA_TOKENIZER_CHECK_H_

#include <string>

#include "absl/status/status.h"
#include "examples/llama/data/token_file.h"

namespace llama {

// InvalidArgument, naming both: the tokens were not made with this
// tokenizer.json, byte for byte. If it cannot be read, what the system says.
absl::Status CheckTokenizer(const TokenFile& tokens,
                            const std::string& tokenizer_json);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKENIZER_CHECK_H_
