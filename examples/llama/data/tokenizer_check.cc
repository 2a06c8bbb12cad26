#include "examples/llama/data/tokenizer_check.h"

#include <array>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "examples/llama/data/token_file.h"
#include "mbedtls/md.h"

namespace llama {
namespace {

// Returns the digest in hexadecimal.
std::string Sha256(absl::string_view bytes) {
  std::array<unsigned char, 32> digest;
  FSDP_CHECK(mbedtls_md(mbedtls_md_info_from_type(MBEDTLS_MD_SHA256),
                        reinterpret_cast<const unsigned char*>(bytes.data()),
                        bytes.size(), digest.data()) == 0);
  return absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(digest.data()), digest.size()));
}

}  // namespace

absl::Status CheckTokenizer(const TokenFile& tokens,
                            const std::string& tokenizer_json) {
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> file,
                        MappedFile::Open(tokenizer_json));
  const std::string& expected = tokens.description().tokenizer_sha256;
  if (Sha256(file->bytes()) == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tokens of ", tokens.path(), ": they are ",
                   expected.empty() ? "bytes" : "another tokenizer's",
                   ", not those of ", tokenizer_json,
                   ": make them anew with tools/tokenize_text.py --tokenizer=",
                   tokenizer_json));
}

}  // namespace llama
