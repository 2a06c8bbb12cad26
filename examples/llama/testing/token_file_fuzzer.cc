// Reads files of tokens as anybody may have left them:
//   ./bazelw run --config=fuzz //examples/llama/testing:token_file_fuzz -- DIR
// Stops the program if a token, a document or a count is not what the
// description allows.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ios>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/check.h"
#include "examples/llama/data/token_file.h"

namespace llama {
namespace {

// A file of this process that is there as long as the object lives.
class Written {
 public:
  Written(absl::string_view extension, absl::string_view bytes)
      : path_(absl::StrCat(std::filesystem::temp_directory_path().string(),
                           "/token_file_fuzzer-", getpid(), extension)) {
    std::ofstream(path_, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;
  ~Written() { unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

// Takes what is before the next empty line, and drops that line.
absl::string_view TakePart(absl::string_view& input) {
  const size_t end = input.find("\n\n");
  absl::string_view part = input.substr(0, end);
  input.remove_prefix(end == input.npos ? input.size() : end + 2);
  return part;
}

void CheckTarget(const TokenFile& file, int64_t place, int64_t token) {
  int64_t target = -1;
  FSDP_CHECK(file.ReadTargets(place, absl::MakeSpan(&target, 1)).ok());
  const absl::StatusOr<bool> learned = file.IsLearned({place, place + 1});
  FSDP_CHECK(learned.ok() && target == (*learned ? token : kNoTarget));
}

void CheckTokens(const TokenFile& file) {
  std::vector<int64_t> tokens(file.num_tokens());
  const absl::Status read = file.Read(0, absl::MakeSpan(tokens));
  FSDP_CHECK(read.ok() || absl::IsDataLoss(read));
  for (size_t i = 0; read.ok() && i < tokens.size(); ++i) {
    FSDP_CHECK(tokens[i] >= 0 && tokens[i] < file.description().vocab_size);
    int64_t again = -1;
    FSDP_CHECK(
        file.Read(static_cast<int64_t>(i), absl::MakeSpan(&again, 1)).ok());
    FSDP_CHECK(again == tokens[i]);
    CheckTarget(file, static_cast<int64_t>(i), again);
  }
}

void CheckDocuments(const TokenFile& file) {
  int64_t end = 0;
  for (int64_t i = 0; i < file.num_documents(); ++i) {
    const absl::StatusOr<TokenRange> range = file.Document(i);
    if (!range.ok()) {
      FSDP_CHECK(absl::IsDataLoss(range.status()));
      return;
    }
    FSDP_CHECK(range->begin == end && range->end <= file.num_tokens());
    FSDP_CHECK(range->size() > 0 || file.num_tokens() == 0);
    end = range->end;
  }
  FSDP_CHECK(end == file.num_tokens());
}

void CheckFiles(absl::string_view input) {
  const absl::string_view description = TakePart(input);
  const Written json(".json", description);
  const Written idx(".idx", TakePart(input));
  const bool has_mask = absl::StrContains(description, "\"mask\"");
  const Written mask(".mask", has_mask ? TakePart(input) : "");
  const Written bin(".bin", input);
  const absl::StatusOr<TokenFile> file = TokenFile::Open(bin.path());
  if (!file.ok()) return;
  FSDP_CHECK(file->num_tokens() * file->description().token_bytes ==
             static_cast<int64_t>(input.size()));
  CheckTokens(*file);
  CheckDocuments(*file);
}

}  // namespace
}  // namespace llama

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  llama::CheckFiles({reinterpret_cast<const char*>(data), size});
  return 0;
}
