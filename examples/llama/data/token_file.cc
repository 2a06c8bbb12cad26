#include "examples/llama/data/token_file.h"

#include <array>
#include <cstddef>
#include <limits>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/json.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "mbedtls/md.h"

namespace llama {
namespace {

constexpr absl::string_view kFormat = "fsdp-tokens";
constexpr int64_t kVersion = 2;
constexpr size_t kSha256Digits = 64;
// Bytes of so many elements fit an int64_t.
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max() / 8;

absl::Status Wrong(absl::string_view key, absl::string_view wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("\"", key, "\" has to be ", wanted));
}

absl::StatusOr<int64_t> IntegerOf(const fsdp::Json& json, absl::string_view key,
                                  int64_t least, int64_t greatest) {
  const auto* const number = json.FindAs<int64_t>(key);
  if (number == nullptr || *number < least || *number > greatest) {
    return Wrong(key,
                 absl::StrCat("an integer from ", least, " to ", greatest));
  }
  return *number;
}

absl::StatusOr<std::string> TextOf(const fsdp::Json& json,
                                   absl::string_view key) {
  const auto* const text = json.FindAs<std::string>(key);
  if (text == nullptr) return Wrong(key, "a text");
  return *text;
}

bool IsNull(const fsdp::Json& json, absl::string_view key) {
  return json.FindAs<std::nullptr_t>(key) != nullptr;
}

}  // namespace

absl::StatusOr<TokenDescription> ParseTokenDescription(absl::string_view json) {
  FSDP_ASSIGN_OR_RETURN(const fsdp::Json value, fsdp::Json::Parse(json));
  FSDP_ASSIGN_OR_RETURN(const std::string format, TextOf(value, "format"));
  if (format != kFormat) return Wrong("format", kFormat);
  FSDP_ASSIGN_OR_RETURN(
      const int64_t version,
      IntegerOf(value, "version", 1, std::numeric_limits<int64_t>::max()));
  if (version > kVersion) {
    return absl::UnimplementedError(absl::StrCat(
        "it is of version ", version, "; this program reads up to ", kVersion,
        ": take a newer one, or make the file with its tokenize_text.py"));
  }
  TokenDescription description;
  FSDP_ASSIGN_OR_RETURN(const std::string dtype, TextOf(value, "dtype"));
  if (dtype != "uint16" && dtype != "uint32") {
    return Wrong("dtype", "\"uint16\" or \"uint32\"");
  }
  description.token_bytes = dtype == "uint16" ? 2 : 4;
  FSDP_ASSIGN_OR_RETURN(description.num_tokens,
                        IntegerOf(value, "num_tokens", 0, kMaxCount));
  FSDP_ASSIGN_OR_RETURN(
      description.num_documents,
      IntegerOf(value, "num_documents", 0, description.num_tokens));
  FSDP_ASSIGN_OR_RETURN(description.vocab_size,
                        IntegerOf(value, "vocab_size", 1,
                                  int64_t{1} << 8 * description.token_bytes));
  for (const char* const key : {"bos_id", "eos_id"}) {
    if (IsNull(value, key)) continue;
    FSDP_RETURN_IF_ERROR(
        IntegerOf(value, key, 0, description.vocab_size - 1).status());
  }
  if (value.Find("mask") != nullptr) {
    const auto* const has_mask = value.FindAs<bool>("mask");
    if (has_mask == nullptr) return Wrong("mask", "true or false");
    description.has_mask = *has_mask;
  }
  if (IsNull(value, "tokenizer_sha256")) return description;
  FSDP_ASSIGN_OR_RETURN(description.tokenizer_sha256,
                        TextOf(value, "tokenizer_sha256"));
  if (description.tokenizer_sha256.size() != kSha256Digits ||
      !absl::c_all_of(description.tokenizer_sha256, [](char digit) {
        return absl::ascii_isxdigit(digit) && !absl::ascii_isupper(digit);
      })) {
    return Wrong("tokenizer_sha256", "null or 64 hexadecimal digits");
  }
  return description;
}

namespace {

constexpr int64_t kDocumentBytes = 8;
constexpr size_t kMaxDescriptionBytes = 1 << 20;

uint64_t LittleEndian(const char* bytes, int size) {
  uint64_t value = 0;
  for (int i = 0; i < size; ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << 8 * i;
  }
  return value;
}

// Returns the digest in hexadecimal.
std::string Sha256(absl::string_view bytes) {
  std::array<unsigned char, 32> digest;
  FSDP_CHECK(mbedtls_md(mbedtls_md_info_from_type(MBEDTLS_MD_SHA256),
                        reinterpret_cast<const unsigned char*>(bytes.data()),
                        bytes.size(), digest.data()) == 0);
  return absl::BytesToHexString(absl::string_view(
      reinterpret_cast<const char*>(digest.data()), digest.size()));
}

absl::Status Prefixed(const absl::Status& status, absl::string_view path,
                      absl::string_view advice) {
  return absl::Status(status.code(), absl::StrCat("tokens of ", path, ": ",
                                                  status.message(), advice));
}

absl::StatusOr<std::shared_ptr<fsdp::File>> Open(const std::string& path) {
  // A pipe would be waited for.
  FSDP_RETURN_IF_ERROR(fsdp::OpenToRead(path).status());
  return fsdp::RealFileSystem().OpenForReading(path, fsdp::Caching::kCached);
}

absl::Status CheckSize(fsdp::File& file, absl::string_view path, int64_t count,
                       int64_t item_bytes) {
  FSDP_ASSIGN_OR_RETURN(const int64_t size, file.Size());
  if (size == count * item_bytes) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("tokens of ", path, ": it has ", size,
                   " bytes where its .json says ", count, " times ", item_bytes,
                   ": it was cut short or is another run's; make it anew with "
                   "tools/tokenize_text.py, or copy all files of that name"));
}

absl::StatusOr<TokenDescription> ReadDescription(const std::string& path) {
  constexpr absl::string_view kAdvice =
      "; tools/tokenize_text.py makes files of tokens with their description, "
      "which for tokens from elsewhere can be written by hand "
      "(examples/llama/data/README.md)";
  const absl::StatusOr<std::string> text = fsdp::ReadRegularFile(path);
  if (!text.ok()) return Prefixed(text.status(), path, kAdvice);
  if (text->size() > kMaxDescriptionBytes) {
    return Prefixed(absl::InvalidArgumentError("it is too large"), path,
                    kAdvice);
  }
  absl::StatusOr<TokenDescription> description = ParseTokenDescription(*text);
  if (!description.ok()) return Prefixed(description.status(), path, kAdvice);
  return description;
}

}  // namespace

absl::StatusOr<TokenFile> TokenFile::Open(const std::string& path) {
  absl::string_view name = path;
  if (!absl::ConsumeSuffix(&name, ".bin")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tokens of ", path,
        ": files of tokens are called NAME.bin and lie beside their NAME.json; "
        "tools/tokenize_text.py makes them of text"));
  }
  TokenFile file;
  file.path_ = path;
  FSDP_ASSIGN_OR_RETURN(file.description_,
                        ReadDescription(absl::StrCat(name, ".json")));
  FSDP_ASSIGN_OR_RETURN(file.tokens_, llama::Open(path));
  FSDP_RETURN_IF_ERROR(CheckSize(*file.tokens_, path,
                                 file.description_.num_tokens,
                                 file.description_.token_bytes));
  if (file.description_.num_documents > 0) {
    const std::string index = absl::StrCat(name, ".idx");
    FSDP_ASSIGN_OR_RETURN(file.documents_, llama::Open(index));
    FSDP_RETURN_IF_ERROR(CheckSize(*file.documents_, index,
                                   file.description_.num_documents,
                                   kDocumentBytes));
  }
  if (file.description_.has_mask) {
    const std::string mask = absl::StrCat(name, ".mask");
    FSDP_ASSIGN_OR_RETURN(file.mask_, llama::Open(mask));
    FSDP_RETURN_IF_ERROR(
        CheckSize(*file.mask_, mask, file.description_.num_tokens, 1));
  }
  return file;
}

absl::StatusOr<TokenFile> TokenFile::OpenBytes(const std::string& path) {
  TokenFile file;
  file.path_ = path;
  FSDP_ASSIGN_OR_RETURN(file.tokens_, llama::Open(path));
  FSDP_ASSIGN_OR_RETURN(file.description_.num_tokens, file.tokens_->Size());
  return file;
}

absl::Status TokenFile::Read(int64_t begin, absl::Span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  FSDP_CHECK(begin >= 0 && begin <= num_tokens() &&
             count <= num_tokens() - begin);
  const int size = description_.token_bytes;
  std::string bytes(out.size() * size, '\0');
  FSDP_RETURN_IF_ERROR(tokens_->PRead(begin * size, absl::MakeSpan(bytes)));
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<int64_t>(LittleEndian(&bytes[i * size], size));
  }
  const auto* const wrong = absl::c_find_if(
      out, [this](int64_t id) { return id >= description_.vocab_size; });
  if (wrong == out.end()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "tokens of ", path_, ": number ", begin + (wrong - out.begin()), " is ",
      *wrong, ", but there are only ", description_.vocab_size,
      " tokens: the file is damaged, or has some that the model lacks; make it "
      "anew"));
}

absl::Status TokenFile::ReadTargets(int64_t begin,
                                    absl::Span<int64_t> out) const {
  FSDP_RETURN_IF_ERROR(Read(begin, out));
  if (mask_ == nullptr) return absl::OkStatus();
  std::string mask(out.size(), '\0');
  FSDP_RETURN_IF_ERROR(mask_->PRead(begin, absl::MakeSpan(mask)));
  for (size_t i = 0; i < out.size(); ++i) {
    if (mask[i] == 0) out[i] = kNoTarget;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> TokenFile::IsLearned(const TokenRange& tokens) const {
  if (mask_ == nullptr) return true;
  std::string mask(tokens.size(), '\0');
  FSDP_RETURN_IF_ERROR(mask_->PRead(tokens.begin, absl::MakeSpan(mask)));
  return absl::c_any_of(mask, [](char is_learned) { return is_learned != 0; });
}

int64_t TokenFile::num_documents() const {
  return documents_ == nullptr ? 1 : description_.num_documents;
}

absl::StatusOr<TokenRange> TokenFile::Document(int64_t index) const {
  FSDP_CHECK(index >= 0 && index < num_documents());
  if (documents_ == nullptr) return TokenRange{0, num_tokens()};
  const bool is_last = index + 1 == num_documents();
  char bytes[2 * kDocumentBytes];
  FSDP_RETURN_IF_ERROR(documents_->PRead(
      index * kDocumentBytes,
      absl::MakeSpan(bytes, (is_last ? 1 : 2) * kDocumentBytes)));
  const auto all = static_cast<uint64_t>(num_tokens());
  const uint64_t begin = LittleEndian(bytes, kDocumentBytes);
  const uint64_t end =
      is_last ? all : LittleEndian(bytes + kDocumentBytes, kDocumentBytes);
  if (begin < end && (index > 0 || begin == 0) && (is_last || end < all)) {
    return TokenRange{static_cast<int64_t>(begin), static_cast<int64_t>(end)};
  }
  return absl::DataLossError(absl::StrCat(
      "tokens of ", path_, ": document ", index,
      " does not begin or end where one can: the .idx beside it is damaged or "
      "another file's; make all of them anew with tools/tokenize_text.py"));
}

absl::Status CheckTokenizer(const TokenFile& tokens,
                            const std::string& tokenizer_json) {
  FSDP_ASSIGN_OR_RETURN(const std::string text,
                        fsdp::ReadRegularFile(tokenizer_json));
  const std::string& expected = tokens.description().tokenizer_sha256;
  if (Sha256(text) == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tokens of ", tokens.path(), ": they are ",
                   expected.empty() ? "bytes" : "another tokenizer's",
                   ", not those of ", tokenizer_json,
                   ": make them anew with tools/tokenize_text.py --tokenizer=",
                   tokenizer_json));
}

}  // namespace llama
