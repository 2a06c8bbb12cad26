// Tokens to train on, in a file.
#ifndef EXAMPLES_LLAMA_DATA_TOKEN_FILE_H_
#define EXAMPLES_LLAMA_DATA_TOKEN_FILE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"

namespace llama {

// The target where there is nothing to predict, which LibTorch's losses ignore.
inline constexpr int64_t kNoTarget = -100;

// The JSON beside a file of tokens; README.md describes it.
struct TokenDescription {
  int token_bytes = 1;
  int64_t num_tokens = 0;
  int64_t num_documents = 0;     // 0: it is not known where they begin
  int64_t vocab_size = 256;      // every token is below it
  std::string tokenizer_sha256;  // hexadecimal; empty: tokens are bytes
  bool has_mask = false;         // not all tokens are learned
};

// InvalidArgument: it is not as README.md says. Unimplemented: it is of a later
// version.
absl::StatusOr<TokenDescription> ParseTokenDescription(absl::string_view json);

struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

// A file that tools/tokenize_text.py has written, in the format of README.md,
// or the bytes of any file. Copies share what is open. Thread-safe. Errors of
// reading are those of File.
class TokenFile {
 public:
  // Opens NAME.bin with its NAME.json and, if that tells of them, NAME.idx and
  // NAME.mask.
  // Errors name the file and say what to do: what the system says of a missing
  // one, InvalidArgument for a name or description of another format,
  // Unimplemented for a later version, DataLoss for a size other than the
  // description says.
  static absl::StatusOr<TokenFile> Open(const std::string& path);

  // Opens a file whose bytes are the tokens, 256 of them, in one document.
  static absl::StatusOr<TokenFile> OpenBytes(const std::string& path);

  const std::string& path() const { return path_; }
  int64_t num_tokens() const { return description_.num_tokens; }
  const TokenDescription& description() const { return description_; }

  // Makes tokens from `vocab_size` on errors, too.
  void LimitVocabulary(int64_t vocab_size) {
    description_.vocab_size = std::min(description_.vocab_size, vocab_size);
  }

  // Reads the tokens from `begin` on, as many as `out` holds, all within
  // [0, num_tokens()]. DataLoss names the position of a token that is not below
  // vocab_size. After an error `out` is undefined.
  absl::Status Read(int64_t begin, absl::Span<int64_t> out) const;
  // The same, with kNoTarget for tokens that are not learned.
  absl::Status ReadTargets(int64_t begin, absl::Span<int64_t> out) const;
  // Returns whether a token of the range, within [0, num_tokens()], is learned:
  // all are, but for those of a mask.
  absl::StatusOr<bool> IsLearned(const TokenRange& tokens) const;

  // Returns 1 if it is not known where documents begin.
  int64_t num_documents() const;
  // Returns one of these documents. DataLoss: NAME.idx is not in order, since
  // documents are never empty and the first begins at 0.
  absl::StatusOr<TokenRange> Document(int64_t index) const;

 private:
  TokenFile() = default;

  std::string path_;
  TokenDescription description_;
  std::shared_ptr<fsdp::File> tokens_;
  std::shared_ptr<fsdp::File> documents_;  // null: one document
  std::shared_ptr<fsdp::File> mask_;       // null: all are learned
};

// InvalidArgument, naming both: the tokens were not made with this
// tokenizer.json, byte for byte. If it cannot be read, what the system says.
absl::Status CheckTokenizer(const TokenFile& tokens,
                            const std::string& tokenizer_json);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_FILE_H_
