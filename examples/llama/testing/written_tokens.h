// Files of tokens, written by other code than the product's, for tests.
#ifndef EXAMPLES_LLAMA_TESTING_WRITTEN_TOKENS_H_
#define EXAMPLES_LLAMA_TESTING_WRITTEN_TOKENS_H_

#include <cstdint>
#include <fstream>
#include <ios>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"

namespace llama {

// Returns a path of this test's own.
inline std::string PathFor(absl::string_view name) {
  return absl::StrCat(::testing::TempDir(), "/", name);
}

inline void WriteFile(const std::string& path, absl::string_view bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string LittleEndian(absl::Span<const int64_t> values, int bytes) {
  std::string text;
  for (int64_t value : values) {
    for (int i = 0; i < bytes; ++i, value /= 256) {
      text.push_back(static_cast<char>(value % 256));
    }
  }
  return text;
}

struct WrittenTokens {
  std::vector<int64_t> tokens;
  std::vector<int64_t> begins = {};  // of documents; empty: no .idx
  int token_bytes = 2;
  int64_t vocab_size = 65536;
  std::string mask = {};  // empty: none
};

// Returns the path of NAME.bin.
inline std::string WriteTokens(absl::string_view name,
                               const WrittenTokens& written) {
  const std::string base = PathFor(name);
  WriteFile(base + ".bin", LittleEndian(written.tokens, written.token_bytes));
  if (!written.begins.empty()) {
    WriteFile(base + ".idx", LittleEndian(written.begins, 8));
  }
  if (!written.mask.empty()) WriteFile(base + ".mask", written.mask);
  WriteFile(base + ".json",
            absl::StrCat(R"({"format": "fsdp-tokens", "version": )",
                         written.mask.empty() ? "1" : R"(2, "mask": true)",
                         R"(, "dtype": "uint)", 8 * written.token_bytes,
                         R"(", "num_tokens": )", written.tokens.size(),
                         R"(, "num_documents": )", written.begins.size(),
                         R"(, "vocab_size": )", written.vocab_size,
                         R"(, "bos_id": null, "eos_id": null,)"
                         R"( "tokenizer_sha256": null})"));
  return base + ".bin";
}

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TESTING_WRITTEN_TOKENS_H_
