#include "checkpoint/files/range_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {

namespace {

// Small enough that the checksum finds it in the processor's cache.
constexpr int64_t kSlice = int64_t{256} << 10;

}  // namespace

absl::Status RangeWriter::CheckCancelled() const {
  if (options_.cancelled == nullptr || !options_.cancelled->load()) {
    return absl::OkStatus();
  }
  return absl::CancelledError("writing a checkpoint: it was cancelled");
}

absl::StatusOr<std::unique_ptr<RangeWriter>> RangeWriter::Create(
    FileSystem& files, std::vector<std::string> paths,
    RangeWriterOptions options) {
  FSDP_CHECK(options.buffers >= 2 && options.buffer_bytes % kBlockBytes == 0);
  FSDP_ASSIGN_OR_RETURN(
      offload::PageMemory memory,
      offload::PageMemory::Allocate(offload::PageAllocator::System(),
                                    options.buffers * options.buffer_bytes));
  return absl::WrapUnique(new RangeWriter(
      files, std::move(paths), std::move(options), std::move(memory)));
}

RangeWriter::RangeWriter(FileSystem& files, std::vector<std::string> paths,
                         RangeWriterOptions options, offload::PageMemory memory)
    : files_(files),
      paths_(std::move(paths)),
      options_(std::move(options)),
      memory_(std::move(memory)),
      open_(paths_.size()),
      buffers_(options_.buffers) {
  // One buffer is filled meanwhile.
  threads_
      .Start("to write checkpoints",
             options_.in_order ? 1 : options_.buffers - 1)
      .IgnoreError();
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_[i].memory = memory_.data() + i * options_.buffer_bytes;
    free_.push_back(&buffers_[i]);
  }
}

RangeWriter::~RangeWriter() = default;

absl::StatusOr<File*> RangeWriter::Open(int64_t file) {
  if (open_[file] == nullptr) {
    FSDP_ASSIGN_OR_RETURN(
        open_[file], files_.OpenForWriting(
                         paths_[file], options_.in_order ? Caching::kCached
                                                         : Caching::kDirect));
    CameBack(0);
  }
  return open_[file].get();
}

absl::Status RangeWriter::SetSize(int64_t file, int64_t bytes) {
  FSDP_RETURN_IF_ERROR(failed_);
  FSDP_ASSIGN_OR_RETURN(File* const open, Open(file));
  return open->SetSize(bytes);
}

absl::Status RangeWriter::Write(int64_t file, int64_t offset, int64_t bytes,
                                Fill fill) {
  FSDP_RETURN_IF_ERROR(failed_);
  FSDP_CHECK(file >= 0 && file < static_cast<int64_t>(paths_.size()) &&
             offset >= 0 && bytes >= 0);
  failed_ = WriteOnce(file, offset, bytes, fill);
  return failed_;
}

absl::Status RangeWriter::WriteBytes(int64_t file, int64_t offset,
                                     absl::string_view bytes) {
  return Write(file, offset, static_cast<int64_t>(bytes.size()),
               [bytes](int64_t position, absl::Span<char> out) {
                 std::memcpy(out.data(), bytes.data() + position, out.size());
                 return absl::OkStatus();
               });
}

absl::Status RangeWriter::WriteOnce(int64_t file, int64_t offset, int64_t bytes,
                                    Fill fill) {
  if (bytes == 0) FSDP_RETURN_IF_ERROR(Open(file).status());
  int64_t position = 0;
  while (position < bytes) {
    const int64_t at = offset + position;
    FSDP_RETURN_IF_ERROR(Seek(file, at));
    const int64_t in_buffer = at % options_.buffer_bytes;
    const int64_t size =
        std::min({bytes - position, options_.buffer_bytes - in_buffer, kSlice});
    char* const memory = current_->memory + in_buffer;
    FSDP_RETURN_IF_ERROR(fill(position, absl::MakeSpan(memory, size)));
    AppendPieces(file, at, absl::string_view(memory, size), pieces_);
    current_->end += size;
    position += size;
  }
  return absl::OkStatus();
}

absl::Status RangeWriter::Seek(int64_t file, int64_t offset) {
  const bool fits =
      current_ != nullptr && current_->index == file &&
      current_->end == offset &&
      (offset % options_.buffer_bytes != 0 || current_->begin == current_->end);
  if (fits) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(Dispatch());
  FSDP_ASSIGN_OR_RETURN(File* const open, Open(file));
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &RangeWriter::HasFree));
  FSDP_RETURN_IF_ERROR(write_status_);
  current_ = free_.back();
  free_.pop_back();
  *current_ = {current_->memory, open, file, offset, offset};
  return absl::OkStatus();
}

absl::Status RangeWriter::Dispatch() {
  if (current_ == nullptr) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(CheckCancelled());
  Buffer* const buffer = std::exchange(current_, nullptr);
  dispatched_ += buffer->end - buffer->begin;
  if (options_.progress != nullptr) options_.progress(dispatched_);
  threads_.Run([this, buffer] { WriteOut(buffer); });
  return absl::OkStatus();
}

void RangeWriter::WriteOut(Buffer* buffer) {
  const char* const memory =
      buffer->memory + buffer->begin % options_.buffer_bytes;
  const int64_t bytes = buffer->end - buffer->begin;
  absl::Status status =
      buffer->file->PWrite(buffer->begin, absl::MakeConstSpan(memory, bytes));
  if (status.ok()) CameBack(bytes);
  absl::MutexLock lock(&mutex_);
  write_status_.Update(std::move(status));
  free_.push_back(buffer);
}

void RangeWriter::CameBack(int64_t bytes) const {
  if (options_.came_back != nullptr) options_.came_back(bytes);
}

absl::Status RangeWriter::FinishOnce() {
  FSDP_RETURN_IF_ERROR(Dispatch());
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &RangeWriter::AllFree));
    FSDP_RETURN_IF_ERROR(write_status_);
  }
  for (const std::unique_ptr<File>& file : open_) {
    FSDP_RETURN_IF_ERROR(CheckCancelled());
    if (file == nullptr) continue;
    FSDP_RETURN_IF_ERROR(file->Sync());
    CameBack(0);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FilePiece>> RangeWriter::Finish() {
  FSDP_RETURN_IF_ERROR(failed_);
  failed_ = FinishOnce();
  FSDP_RETURN_IF_ERROR(failed_);
  return std::move(pieces_);
}

}  // namespace fsdp::checkpoint
