#include "offload/commit_log.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "offload/io_queue.h"
#include "offload/param_store.h"

namespace fsdp::offload {
namespace {

// Runs a request while nothing else is in flight. A Wake() that comes meanwhile
// is handed on to the next Wait().
absl::Status Run(IoQueue& queue, IoRequest request, absl::string_view what,
                 absl::string_view path) {
  queue.Start(&request);
  std::vector<IoRequest*> over;
  while (over.empty()) queue.Wait(over);
  FSDP_CHECK(over.size() == 1 && over[0] == &request);
  queue.Wake();
  return CheckMoved(request, what, path);
}

}  // namespace

absl::StatusOr<FileHeader> ReadHeader(IoQueue& queue, char* memory,
                                      absl::string_view path) {
  FSDP_RETURN_IF_ERROR(Run(queue,
                           {IoRequest::Kind::kRead, memory, kHeaderBytes, 0, 0},
                           "read the header", path));
  absl::StatusOr<FileHeader> header =
      FileHeader::Decode(absl::string_view(memory, kHeaderBytes));
  if (header.ok()) return header;
  if (absl::IsFailedPrecondition(header.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "read the header of ", path, ": it ", header.status().message()));
  }
  return absl::DataLossError(absl::StrCat(
      "read the header of ", path, ": it ", header.status().message(),
      "; this is no file of an offload store, or it has been changed"));
}

int64_t CommitLog::MemoryBytes(const FileLayout& layout) {
  return std::max(layout.record_bytes, kHeaderBytes);
}

absl::StatusOr<CommitLog> CommitLog::Make(const FileLayout& layout,
                                          PageAllocator& allocator) {
  FSDP_ASSIGN_OR_RETURN(PageMemory memory,
                        PageMemory::Allocate(allocator, MemoryBytes(layout)));
  return CommitLog(layout, std::move(memory));
}

absl::Status CommitLog::WriteHeader(IoQueue& queue) {
  return WriteAt(queue, "write the header", layout_->header.Encode(), 0);
}

absl::Status CommitLog::Write(IoQueue& queue, const CommitRecord& record) {
  return WriteAt(queue, absl::StrCat("commit ", record.commit), record.Encode(),
                 layout_->RecordStart(record.commit));
}

absl::StatusOr<std::vector<CommitRecord>> CommitLog::ReadAll(IoQueue& queue) {
  std::vector<CommitRecord> records;
  for (const int64_t turn : {0, 1}) {
    FSDP_RETURN_IF_ERROR(
        Run(queue,
            {IoRequest::Kind::kRead, memory_.data(), layout_->record_bytes,
             layout_->RecordStart(turn), 0},
            "read a commit", layout_->path));
    absl::StatusOr<CommitRecord> record = CommitRecord::Decode(
        absl::string_view(memory_.data(), layout_->record_bytes),
        layout_->header);
    // The record was never finished, or has been dropped.
    if (!record.ok()) continue;
    records.push_back(*std::move(record));
  }
  std::sort(records.begin(), records.end(),
            [](const CommitRecord& a, const CommitRecord& b) {
              return a.commit < b.commit;
            });
  return records;
}

absl::Status CommitLog::Drop(IoQueue& queue, int64_t commit) {
  return WriteAt(queue, absl::StrCat("drop commit ", commit), "",
                 layout_->RecordStart(commit));
}

// Writes whole pages, with zeros behind `bytes`; an empty `bytes` writes a page
// of zeros.
absl::Status CommitLog::WriteAt(IoQueue& queue, absl::string_view what,
                                absl::string_view bytes, int64_t offset) {
  const int64_t size =
      std::max(kPageBytes, StoredBytes(static_cast<int64_t>(bytes.size())));
  FSDP_CHECK(size <= memory_.bytes());
  std::memset(memory_.data(), 0, size);
  bytes.copy(memory_.data(), bytes.size());
  return Run(queue, {IoRequest::Kind::kWrite, memory_.data(), size, offset, 0},
             what, layout_->path);
}

absl::Status CommitLog::Sync(IoQueue& queue, absl::string_view what) {
  return Run(queue, {IoRequest::Kind::kSync, nullptr, 0, 0, 0}, what,
             layout_->path);
}

}  // namespace fsdp::offload
