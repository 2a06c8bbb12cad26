#include "testing/gpt/batches.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/device_streams.h"
#include "base/output_file.h"
#include "base/status_macros.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxBytes = size_t{1} << 30;
constexpr size_t kMaxBlockBytes = 64 << 10;
constexpr size_t kBlocksPerHeldOut = 20;

// Returns the visible regular files below `directory`, sorted as bytes.
absl::StatusOr<std::vector<std::string>> ListFiles(
    const std::string& directory) {
  std::vector<std::string> paths;
  std::error_code error;
  auto entry = fs::recursive_directory_iterator(directory, error);
  for (; !error && entry != fs::recursive_directory_iterator();
       entry.increment(error)) {
    if (entry->path().filename().string().front() == '.') {
      entry.disable_recursion_pending();
      continue;
    }
    std::error_code ignored;  // a dangling link is no file
    if (entry->is_regular_file(ignored)) paths.push_back(entry->path());
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(),
                               absl::StrCat("reading text from ", directory));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

absl::StatusOr<std::string> ReadDirectory(const std::string& directory,
                                          int* num_files) {
  FSDP_ASSIGN_OR_RETURN(std::vector<std::string> paths, ListFiles(directory));
  std::string text;
  for (const std::string& path : paths) {
    FSDP_ASSIGN_OR_RETURN(const std::string file, fsdp::ReadRegularFile(path));
    if (file.find('\0') != std::string::npos) continue;
    text += file;
    ++*num_files;
    if (text.size() > kMaxBytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "reading text from ", directory,
          ": this makes more than 1 GiB; name a smaller part of it"));
    }
  }
  if (*num_files == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "reading text from ", directory, ": the directory has no text files"));
  }
  return text;
}

}  // namespace

TextCorpus SplitText(absl::string_view text) {
  TextCorpus corpus;
  const size_t block = std::min(
      kMaxBlockBytes, std::max<size_t>(1, text.size() / kBlocksPerHeldOut));
  size_t index = 0;
  for (size_t begin = 0; begin < text.size(); begin += block) {
    const bool held_out = ++index % kBlocksPerHeldOut == 0;
    absl::StrAppend(held_out ? &corpus.validation : &corpus.train,
                    text.substr(begin, block));
  }
  for (unsigned char byte : text) {
    corpus.largest_byte = std::max(corpus.largest_byte, byte);
  }
  return corpus;
}

absl::StatusOr<TextCorpus> ReadTextCorpus(const std::string& path,
                                          size_t min_bytes) {
  std::string text;
  int num_files = 0;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    FSDP_ASSIGN_OR_RETURN(text, ReadDirectory(path, &num_files));
  } else {
    FSDP_ASSIGN_OR_RETURN(text, fsdp::ReadRegularFile(path));
    num_files = 1;
  }
  TextCorpus corpus = SplitText(text);
  corpus.num_files = num_files;
  if (std::min(corpus.train.size(), corpus.validation.size()) < min_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "reading text from ", path, ": ", text.size(),
        " bytes are too few: ", "of the ", corpus.validation.size(),
        " held out for validation, ", min_bytes, " are needed"));
  }
  return corpus;
}

CountData::CountData(int64_t vocab, BatchShape shape, int rank)
    : vocab_(vocab),
      shape_(shape),
      generator_(at::make_generator<at::CPUGeneratorImpl>(kDataSeed + rank)) {}

Batch CountData::Next() {
  // The peer draws whole rows and keeps their first tokens.
  const at::Tensor first =
      at::randint(vocab_, {shape_.batch, shape_.seq + 1}, generator_, at::kLong)
          .slice(/*dim=*/1, 0, 1);
  const at::Tensor rows =
      first.add(at::arange(shape_.seq + 1, at::kLong)).remainder(vocab_);
  return {rows.slice(1, 0, shape_.seq), rows.slice(1, 1)};
}

Batch WindowsAt(absl::string_view text, absl::Span<const int64_t> starts,
                int64_t seq) {
  const auto batch = static_cast<int64_t>(starts.size());
  const at::Tensor windows = at::empty({batch, seq + 1}, at::kLong);
  int64_t* out = windows.mutable_data_ptr<int64_t>();
  for (int64_t start : starts) {
    for (char byte : text.substr(start, seq + 1)) {
      *out++ = static_cast<unsigned char>(byte);
    }
  }
  return {windows.slice(/*dim=*/1, 0, seq), windows.slice(1, 1)};
}

RandomWindows::RandomWindows(absl::string_view text, BatchShape shape,
                             uint64_t seed)
    : text_(text),
      shape_(shape),
      generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

Batch RandomWindows::Next() {
  const int64_t num_starts = static_cast<int64_t>(text_.size()) - shape_.seq;
  const at::Tensor starts =
      at::randint(num_starts, {shape_.batch}, generator_, at::kLong);
  return WindowsAt(
      text_,
      absl::MakeConstSpan(starts.const_data_ptr<int64_t>(), starts.numel()),
      shape_.seq);
}

std::vector<Batch> EvenWindows(absl::string_view text, BatchShape shape,
                               int64_t num_windows, int rank, int world_size) {
  const int64_t num_starts = static_cast<int64_t>(text.size()) - shape.seq;
  const int64_t num_batches = num_windows / (world_size * shape.batch);
  std::vector<Batch> batches;
  for (int64_t i = 0; i < num_batches; ++i) {
    std::vector<int64_t> starts;
    for (int64_t row = 0; row < shape.batch; ++row) {
      const int64_t window = (i * shape.batch + row) * world_size + rank;
      starts.push_back(num_starts * window / num_windows);
    }
    batches.push_back(WindowsAt(text, starts, shape.seq));
  }
  return batches;
}

Batch PartBatches::Next() {
  Stream& stream = streams_[part_];
  if (stream.source == nullptr) stream.source = make_(part_);
  for (; stream.next < step_; ++stream.next) stream.source->Next();
  ++stream.next;
  return stream.source->Next();
}

Batch ToDevice(const Batch& batch, c10::Device device) {
  return {fsdp::CopyToDevice(batch.inputs, device),
          fsdp::CopyToDevice(batch.targets, device)};
}

}  // namespace gpt
