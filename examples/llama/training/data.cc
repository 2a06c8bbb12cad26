#include "examples/llama/training/data.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ios>
#include <memory>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/data/tokenizer_check.h"
#include "examples/llama/data/window_rows.h"
#include "examples/llama/flags/train_flags.h"
#include "examples/llama/model/llama_config.h"

namespace llama {
namespace {

// By this seed documents are shuffled before packing, the same way in all runs.
constexpr uint64_t kEvaluationSeed = 0;

absl::StatusOr<std::shared_ptr<const RowSource>> RowsOf(const TokenFile& tokens,
                                                        Rows rows, int64_t seq,
                                                        uint64_t seed,
                                                        LastWindow last) {
  if (rows == Rows::kPacked) return PackedRows::Create(tokens, seq, seed);
  return WindowRows::Create(tokens, seq, last);
}

}  // namespace

absl::StatusOr<TokenFile> OpenTokens(const std::string& path,
                                     const std::string& model_folder,
                                     const LlamaConfig& config) {
  const bool are_tokens = absl::EndsWith(path, ".bin");
  FSDP_ASSIGN_OR_RETURN(TokenFile tokens, are_tokens
                                              ? TokenFile::Open(path)
                                              : TokenFile::OpenBytes(path));
  if (tokens.description().vocab_size > config.vocab_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has tokens up to ", tokens.description().vocab_size - 1,
        ", the model's vocabulary has ", config.vocab_size,
        ": make the tokens with the model's tokenizer"));
  }
  const std::string tokenizer = absl::StrCat(model_folder, "/tokenizer.json");
  std::error_code ignored;
  if (are_tokens && std::filesystem::exists(tokenizer, ignored)) {
    FSDP_RETURN_IF_ERROR(CheckTokenizer(tokens, tokenizer));
  }
  return tokens;
}

bool LooksLikeJsonLines(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string line;
  // A longer line is cut and is then not JSON.
  constexpr size_t kMost = 1 << 20;
  for (char byte; line.size() < kMost && file.get(byte) && byte != '\n';) {
    line.push_back(byte);
  }
  const absl::StatusOr<fsdp::Json> json = fsdp::Json::Parse(line);
  return json.ok() && json->As<fsdp::Json::Object>() != nullptr;
}

absl::StatusOr<std::shared_ptr<const RowSource>> TrainingRows(
    const TokenFile& tokens, Rows rows, int64_t seq, uint64_t seed) {
  return RowsOf(tokens, rows, seq, seed, LastWindow::kLeftOut);
}

absl::StatusOr<std::shared_ptr<const RowSource>> EvaluationRows(
    const TokenFile& tokens, Rows rows, int64_t seq) {
  return RowsOf(tokens, rows, seq, kEvaluationSeed, LastWindow::kPadded);
}

}  // namespace llama
