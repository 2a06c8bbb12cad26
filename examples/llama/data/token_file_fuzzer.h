// Files of tokens as anybody may have left them:
//   ./bazelw run --config=fuzz //examples/llama/data:token_file_fuzz -- DIR
// Stops the program where a token, a document or a count is not what the
// description allows.
#ifndef EXAMPLES_LLAMA_DATA_TOKEN_FILE_FUZZER_H_
#define EXAMPLES_LLAMA_DATA_TOKEN_FILE_FUZZER_H_

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_FILE_FUZZER_H_
