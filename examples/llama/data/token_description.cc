#include "examples/llama/data/token_description.h"

#include <limits>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"

namespace llama {
namespace {

constexpr absl::string_view kFormat = "fsdp-tokens";
constexpr int64_t kVersion = 1;
constexpr size_t kSha256Digits = 64;
// So that their bytes are no more than an int64_t holds.
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max() / 8;

absl::Status Wrong(absl::string_view key, absl::string_view wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("\"", key, "\" has to be ", wanted));
}

absl::StatusOr<int64_t> IntegerOf(const fsdp::Json& json, absl::string_view key,
                                  int64_t least, int64_t greatest) {
  const fsdp::Json* const value = json.Find(key);
  const int64_t* const number =
      value == nullptr ? nullptr : value->As<int64_t>();
  if (number == nullptr || *number < least || *number > greatest) {
    return Wrong(key,
                 absl::StrCat("an integer from ", least, " to ", greatest));
  }
  return *number;
}

absl::StatusOr<std::string> TextOf(const fsdp::Json& json,
                                   absl::string_view key) {
  const fsdp::Json* const value = json.Find(key);
  const std::string* const text =
      value == nullptr ? nullptr : value->As<std::string>();
  if (text == nullptr) return Wrong(key, "a text");
  return *text;
}

bool IsNull(const fsdp::Json& json, absl::string_view key) {
  const fsdp::Json* const value = json.Find(key);
  return value != nullptr && *value == fsdp::Json();
}

absl::StatusOr<std::optional<int64_t>> TokenOf(const fsdp::Json& json,
                                               absl::string_view key,
                                               int64_t vocab_size) {
  if (IsNull(json, key)) return std::optional<int64_t>();
  FSDP_ASSIGN_OR_RETURN(const int64_t token,
                        IntegerOf(json, key, 0, vocab_size - 1));
  return std::optional<int64_t>(token);
}

absl::StatusOr<std::string> Sha256Of(const fsdp::Json& json,
                                     absl::string_view key) {
  if (IsNull(json, key)) return std::string();
  FSDP_ASSIGN_OR_RETURN(std::string digits, TextOf(json, key));
  bool is_right = digits.size() == kSha256Digits;
  for (char digit : digits) {
    is_right &= absl::ascii_isxdigit(digit) && !absl::ascii_isupper(digit);
  }
  if (!is_right) return Wrong(key, "null or 64 hexadecimal digits");
  return digits;
}

absl::StatusOr<int> TokenBytesOf(const fsdp::Json& json) {
  FSDP_ASSIGN_OR_RETURN(const std::string dtype, TextOf(json, "dtype"));
  if (dtype == "uint16") return 2;
  if (dtype == "uint32") return 4;
  return Wrong("dtype", "\"uint16\" or \"uint32\"");
}

}  // namespace

absl::StatusOr<TokenDescription> ParseTokenDescription(absl::string_view json) {
  FSDP_ASSIGN_OR_RETURN(const fsdp::Json value, fsdp::Json::Parse(json));
  FSDP_ASSIGN_OR_RETURN(const std::string format, TextOf(value, "format"));
  if (format != kFormat) return Wrong("format", kFormat);
  FSDP_ASSIGN_OR_RETURN(
      const int64_t version,
      IntegerOf(value, "version", 1, std::numeric_limits<int64_t>::max()));
  if (version != kVersion) {
    return absl::UnimplementedError(absl::StrCat(
        "it is of version ", version, "; this program reads ", kVersion,
        ": take a newer one, or make the file with its tokenize_text.py"));
  }
  TokenDescription description;
  FSDP_ASSIGN_OR_RETURN(description.token_bytes, TokenBytesOf(value));
  FSDP_ASSIGN_OR_RETURN(description.num_tokens,
                        IntegerOf(value, "num_tokens", 0, kMaxCount));
  FSDP_ASSIGN_OR_RETURN(
      description.num_documents,
      IntegerOf(value, "num_documents", 0, description.num_tokens));
  FSDP_ASSIGN_OR_RETURN(description.vocab_size,
                        IntegerOf(value, "vocab_size", 1,
                                  int64_t{1} << 8 * description.token_bytes));
  FSDP_ASSIGN_OR_RETURN(description.bos_id,
                        TokenOf(value, "bos_id", description.vocab_size));
  FSDP_ASSIGN_OR_RETURN(description.eos_id,
                        TokenOf(value, "eos_id", description.vocab_size));
  FSDP_ASSIGN_OR_RETURN(description.tokenizer_sha256,
                        Sha256Of(value, "tokenizer_sha256"));
  return description;
}

}  // namespace llama
