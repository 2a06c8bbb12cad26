// Tokens to train on, in a file.
#ifndef EXAMPLES_LLAMA_DATA_TOKEN_FILE_H_
#define EXAMPLES_LLAMA_DATA_TOKEN_FILE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

// The JSON beside a file of tokens.

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

// Files as memory.

// A regular file, read as its bytes are looked at; memory that the system can
// take back. Who cuts it short meanwhile ends the process (SIGBUS).
// Thread-safe.
class MappedFile {
 public:
  // Errors name `path`: what the system says, InvalidArgument for what is no
  // regular file.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(
      const std::string& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  absl::string_view bytes() const { return bytes_; }

 private:
  explicit MappedFile(absl::string_view bytes) : bytes_(bytes) {}

  const absl::string_view bytes_;  // of an empty file: not mapped
};

struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

// What tools/tokenize_text.py has written, in the format of README.md, or the
// bytes of any file. Copies share the mapping (MappedFile). Thread-safe.
class TokenFile {
 public:
  // NAME.bin with its NAME.json and, if that has documents, NAME.idx. Errors
  // name the file and say what to do: what the system says of one that is
  // missing, InvalidArgument for names and descriptions that are not of this
  // format, Unimplemented for those of a later version, DataLoss for sizes that
  // are not what the description says.
  static absl::StatusOr<TokenFile> Open(const std::string& path);

  // Bytes as tokens, 256 of them, in one document.
  static absl::StatusOr<TokenFile> OpenBytes(const std::string& path);

  // As a document of its own, within [0, num_tokens()].
  TokenFile Part(TokenRange range) const;

  const std::string& path() const { return path_; }
  int64_t num_tokens() const { return part_.size(); }
  // vocab_size and what follows it there; the counts are of the whole file.
  const TokenDescription& description() const { return description_; }

  // The tokens from `begin` on, as many as `out` holds, all within
  // [0, num_tokens()]. DataLoss, naming the position, for one that is not less
  // than vocab_size; `out` then holds anything.
  absl::Status Read(int64_t begin, absl::Span<int64_t> out) const;

  // One where nobody knows where they begin.
  int64_t num_documents() const;
  // Of these. DataLoss where NAME.idx is not in order: documents are never
  // empty, and the first begins at 0.
  absl::StatusOr<TokenRange> Document(int64_t index) const;

 private:
  TokenFile() = default;

  absl::Status MapDocuments(const std::string& path);
  int64_t DocumentBegin(int64_t index) const;

  std::string path_;
  TokenDescription description_;
  std::shared_ptr<const MappedFile> tokens_;
  std::shared_ptr<const MappedFile> documents_;  // null: one
  TokenRange part_;                              // of the file
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_TOKEN_FILE_H_
