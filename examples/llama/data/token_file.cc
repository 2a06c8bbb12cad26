#include "examples/llama/data/token_file.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace llama {
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

// Where `index` is one too many, the end of the last one; -1: beyond all.
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
