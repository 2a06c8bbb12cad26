// Whether tokens are those of a model.
#ifndef EXAMPLES_LLAMA_DATA_TOKENIZER_CHECK_H_
#define EXAMPLES_LLAMA_DATA_TOKENIZER_CHECK_H_

#include <string>

#include "absl/status/status.h"
#include "examples/llama/data/token_file.h"

namespace llama {

// InvalidArgument, naming both: the tokens were not made with this
// tokenizer.json, byte for byte. What the system says of one that cannot be
// read.
absl::Status CheckTokenizer(const TokenFile& tokens,
                            const std::string& tokenizer_json);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKENIZER_CHECK_H_
