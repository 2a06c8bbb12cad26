#include "examples/llama/data/token_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
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
constexpr int64_t kVersion = 1;
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
  if (version != kVersion) {
    return absl::UnimplementedError(absl::StrCat(
        "it is of version ", version, "; this program reads ", kVersion,
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

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(
    const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const fsdp::UniqueFd file, fsdp::OpenToRead(path));
  struct stat status;
  const auto error = [&path] {
    return absl::ErrnoToStatus(errno, absl::StrCat("reading ", path));
  };
  if (fstat(file.get(), &status) != 0) return error();
  absl::string_view bytes;
  if (status.st_size > 0) {  // an empty file cannot be mapped
    const auto size = static_cast<size_t>(status.st_size);
    void* const memory =
        mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED) return error();
    bytes = absl::string_view(static_cast<const char*>(memory), size);
  }
  return std::shared_ptr<const MappedFile>(new MappedFile(bytes));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<char*>(bytes_.data()), bytes_.size());
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

absl::Status CheckSize(const MappedFile& file, absl::string_view path,
                       int64_t count, int64_t item_bytes) {
  const auto size = static_cast<int64_t>(file.bytes().size());
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
  FSDP_ASSIGN_OR_RETURN(file.tokens_, MappedFile::Open(path));
  FSDP_RETURN_IF_ERROR(CheckSize(*file.tokens_, path,
                                 file.description_.num_tokens,
                                 file.description_.token_bytes));
  if (file.description_.num_documents > 0) {
    const std::string index = absl::StrCat(name, ".idx");
    FSDP_ASSIGN_OR_RETURN(file.documents_, MappedFile::Open(index));
    FSDP_RETURN_IF_ERROR(CheckSize(*file.documents_, index,
                                   file.description_.num_documents,
                                   kDocumentBytes));
  }
  return file;
}

absl::StatusOr<TokenFile> TokenFile::OpenBytes(const std::string& path) {
  TokenFile file;
  file.path_ = path;
  FSDP_ASSIGN_OR_RETURN(file.tokens_, MappedFile::Open(path));
  file.description_.num_tokens =
      static_cast<int64_t>(file.tokens_->bytes().size());
  return file;
}

absl::Status TokenFile::Read(int64_t begin, absl::Span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  FSDP_CHECK(begin >= 0 && begin <= num_tokens() &&
             count <= num_tokens() - begin);
  const char* bytes =
      tokens_->bytes().data() + begin * description_.token_bytes;
  for (int64_t& token : out) {
    token = static_cast<int64_t>(LittleEndian(bytes, description_.token_bytes));
    bytes += description_.token_bytes;
  }
  const auto* const wrong = absl::c_find_if(
      out, [this](int64_t id) { return id >= description_.vocab_size; });
  if (wrong == out.end()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "tokens of ", path_, ": number ", begin + (wrong - out.begin()), " is ",
      *wrong, ", but there are only ", description_.vocab_size,
      ": the file is damaged or not what its .json says; make it anew"));
}

int64_t TokenFile::num_documents() const {
  return documents_ == nullptr ? 1 : description_.num_documents;
}

// Returns the end of the last document for an `index` that is one too many, -1
// if the position is outside the file.
int64_t TokenFile::DocumentBegin(int64_t index) const {
  if (index == description_.num_documents) return description_.num_tokens;
  const uint64_t begin = LittleEndian(
      documents_->bytes().data() + index * kDocumentBytes, kDocumentBytes);
  const bool is_inside = begin < static_cast<uint64_t>(num_tokens());
  return is_inside ? static_cast<int64_t>(begin) : -1;
}

absl::StatusOr<TokenRange> TokenFile::Document(int64_t index) const {
  FSDP_CHECK(index >= 0 && index < num_documents());
  if (documents_ == nullptr) return TokenRange{0, num_tokens()};
  TokenRange range = {DocumentBegin(index), DocumentBegin(index + 1)};
  const bool is_first_right = index > 0 || range.begin == 0;
  if (range.begin >= 0 && range.begin < range.end && is_first_right) {
    return range;
  }
  return absl::DataLossError(absl::StrCat(
      "tokens of ", path_, ": document ", index,
      " does not begin or end where one can: the .idx beside it is damaged or "
      "another file's; make all of them anew with tools/tokenize_text.py"));
}

absl::Status CheckTokenizer(const TokenFile& tokens,
                            const std::string& tokenizer_json) {
  FSDP_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(tokenizer_json));
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
