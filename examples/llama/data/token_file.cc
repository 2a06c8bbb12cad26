#include "examples/llama/data/token_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/json.h"
#include "base/output_file.h"
#include "base/status_macros.h"

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

absl::StatusOr<std::shared_ptr<const MappedFile>> MappedFile::Open(
    const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(const int descriptor, fsdp::OpenToRead(path));
  const auto close_it = absl::MakeCleanup([descriptor] { close(descriptor); });
  struct stat status;
  const auto error = [&path] {
    return absl::ErrnoToStatus(errno, absl::StrCat("reading ", path));
  };
  if (fstat(descriptor, &status) != 0) return error();
  absl::string_view bytes;
  if (status.st_size > 0) {  // an empty file cannot be mapped
    const auto size = static_cast<size_t>(status.st_size);
    void* const memory =
        mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
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

template <int kBytes>
uint64_t LittleEndian(const char* bytes) {
  uint64_t value = 0;
  for (int i = 0; i < kBytes; ++i) {
    value |= uint64_t{static_cast<unsigned char>(bytes[i])} << 8 * i;
  }
  return value;
}

template <int kBytes>
void Decode(const char* bytes, absl::Span<int64_t> out) {
  for (int64_t& token : out) {
    token = static_cast<int64_t>(LittleEndian<kBytes>(bytes));
    bytes += kBytes;
  }
}

void Decode(int token_bytes, const char* bytes, absl::Span<int64_t> out) {
  switch (token_bytes) {
    case 1:
      return Decode<1>(bytes, out);
    case 2:
      return Decode<2>(bytes, out);
    default:
      return Decode<4>(bytes, out);
  }
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
  const absl::StatusOr<std::shared_ptr<const MappedFile>> file =
      MappedFile::Open(path);
  if (!file.ok()) return Prefixed(file.status(), path, kAdvice);
  if ((*file)->bytes().size() > kMaxDescriptionBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens of ", path, ": it is too large", kAdvice));
  }
  absl::StatusOr<TokenDescription> description =
      ParseTokenDescription((*file)->bytes());
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
  file.part_.end = file.description_.num_tokens;
  if (file.description_.num_documents > 0) {
    FSDP_RETURN_IF_ERROR(file.MapDocuments(absl::StrCat(name, ".idx")));
  }
  return file;
}

absl::Status TokenFile::MapDocuments(const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(documents_, MappedFile::Open(path));
  return CheckSize(*documents_, path, description_.num_documents,
                   kDocumentBytes);
}

absl::StatusOr<TokenFile> TokenFile::OpenBytes(const std::string& path) {
  TokenFile file;
  file.path_ = path;
  FSDP_ASSIGN_OR_RETURN(file.tokens_, MappedFile::Open(path));
  file.part_.end = static_cast<int64_t>(file.tokens_->bytes().size());
  file.description_.num_tokens = file.part_.end;
  return file;
}

TokenFile TokenFile::Part(TokenRange range) const {
  FSDP_CHECK(range.begin >= 0 && range.begin <= range.end &&
             range.end <= num_tokens());
  TokenFile file = *this;
  file.part_ = {part_.begin + range.begin, part_.begin + range.end};
  file.documents_ = nullptr;
  return file;
}

absl::Status TokenFile::Read(int64_t begin, absl::Span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  FSDP_CHECK(begin >= 0 && begin <= num_tokens() &&
             count <= num_tokens() - begin);
  if (count == 0) return absl::OkStatus();
  const int64_t first = part_.begin + begin;
  Decode(description_.token_bytes,
         tokens_->bytes().data() + first * description_.token_bytes, out);
  const auto wrong = std::find_if(out.begin(), out.end(), [this](int64_t id) {
    return id >= description_.vocab_size;
  });
  if (wrong == out.end()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "tokens of ", path_, ": number ", first + (wrong - out.begin()), " is ",
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
  const uint64_t begin = LittleEndian<kDocumentBytes>(
      documents_->bytes().data() + index * kDocumentBytes);
  const bool is_inside = begin < static_cast<uint64_t>(num_tokens());
  return is_inside ? static_cast<int64_t>(begin) : -1;
}

absl::StatusOr<TokenRange> TokenFile::Document(int64_t index) const {
  FSDP_CHECK(index >= 0 && index < num_documents());
  if (documents_ == nullptr) return TokenRange{0, num_tokens()};
  const TokenRange range = {DocumentBegin(index), DocumentBegin(index + 1)};
  const bool is_first_right = index > 0 || range.begin == 0;
  if (range.begin >= 0 && range.begin < range.end && is_first_right) {
    return range;
  }
  return absl::DataLossError(absl::StrCat(
      "tokens of ", path_, ": document ", index,
      " does not begin or end where one can: the .idx beside it is damaged or "
      "another file's; make all of them anew with tools/tokenize_text.py"));
}

}  // namespace llama
