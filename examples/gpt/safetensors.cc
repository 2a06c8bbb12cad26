#include "examples/gpt/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file_size_errors.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace gpt {
namespace {

absl::Status ErrnoError(absl::string_view what, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(what, " ", path));
}

absl::string_view DtypeName(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "F64";
    case at::kFloat:
      return "F32";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kLong:
      return "I64";
    case at::kInt:
      return "I32";
    case at::kByte:
      return "U8";
    default:
      return "";  // not written by this program
  }
}

std::string Describe(absl::string_view dtype, absl::Span<const int64_t> shape) {
  return absl::StrCat(dtype, "[", absl::StrJoin(shape, ", "), "]");
}

absl::Status CheckMatches(const SafetensorsEntry& entry,
                          const at::Tensor& tensor) {
  if (DtypeName(tensor.scalar_type()) != entry.dtype ||
      tensor.sizes() != entry.shape) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", entry.name, "\" is ",
                     Describe(entry.dtype, entry.shape), " in the file, but ",
                     Describe(DtypeName(tensor.scalar_type()), tensor.sizes()),
                     " in the model"));
  }
  return absl::OkStatus();
}

absl::Status ReadAt(int fd, int64_t offset, char* out, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t count = pread(fd, out, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, "reading");
    if (count == 0) return absl::DataLossError("the file became shorter");
    out += count;
    offset += count;
    bytes -= count;
  }
  return absl::OkStatus();
}

absl::Status WriteAt(int fd, int64_t offset, const char* in, int64_t bytes) {
  const fsdp::FileSizeErrors errors;
  while (bytes > 0) {
    const ssize_t count = pwrite(fd, in, bytes, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, "writing");
    in += count;
    offset += count;
    bytes -= count;
  }
  return absl::OkStatus();
}

}  // namespace

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

SafetensorsReader::SafetensorsReader(std::string path, FileDescriptor file)
    : path_(std::move(path)), file_(std::move(file)) {}

absl::StatusOr<SafetensorsReader> SafetensorsReader::Open(
    const std::string& path) {
  // Opening a FIFO waits for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return ErrnoError("opening", path);
  SafetensorsReader reader(path, FileDescriptor(fd));
  struct stat stat;
  if (fstat(fd, &stat) != 0) return ErrnoError("opening", path);
  if (!S_ISREG(stat.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": no regular file"));
  }
  const auto parse = [&]() -> absl::Status {
    std::string first(std::min<int64_t>(kSafetensorsLengthBytes, stat.st_size),
                      '\0');
    FSDP_RETURN_IF_ERROR(ReadAt(fd, 0, &first[0], first.size()));
    FSDP_ASSIGN_OR_RETURN(int64_t length,
                          ParseSafetensorsLength(first, stat.st_size));
    std::string json(length, '\0');
    FSDP_RETURN_IF_ERROR(
        ReadAt(fd, kSafetensorsLengthBytes, &json[0], json.size()));
    reader.data_begin_ = kSafetensorsLengthBytes + length;
    FSDP_ASSIGN_OR_RETURN(
        std::vector<SafetensorsEntry> entries,
        ParseSafetensorsHeader(json, stat.st_size - reader.data_begin_));
    for (SafetensorsEntry& entry : entries) {
      const std::string name = entry.name;
      reader.entries_.emplace(name, std::move(entry));
    }
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(fsdp::Annotate(parse(), path));
  return reader;
}

absl::Status SafetensorsReader::Read(absl::string_view name,
                                     const at::Tensor& destination) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    return absl::NotFoundError(
        absl::StrCat(path_, ": it has no tensor \"", name, "\""));
  }
  const SafetensorsEntry& entry = found->second;
  FSDP_RETURN_IF_ERROR(fsdp::Annotate(CheckMatches(entry, destination), path_));
  return fsdp::Annotate(
      ReadAt(file_.get(), data_begin_ + entry.begin,
             static_cast<char*>(destination.mutable_data_ptr()),
             entry.end - entry.begin),
      absl::StrCat(path_, ": tensor \"", name, "\""));
}

absl::Status SafetensorsReader::ExpectOnly(
    absl::Span<const std::string> names) const {
  const absl::flat_hash_set<absl::string_view> expected(names.begin(),
                                                        names.end());
  std::vector<absl::string_view> extra;
  for (const auto& [name, entry] : entries_) {
    if (!expected.contains(name)) extra.push_back(name);
  }
  if (extra.empty()) return absl::OkStatus();
  std::sort(extra.begin(), extra.end());
  return absl::InvalidArgumentError(
      absl::StrCat(path_, ": ", extra.size(),
                   " tensors that the model does not have, the first is \"",
                   extra.front(), "\""));
}

SafetensorsWriter::SafetensorsWriter(std::string path, fsdp::PartialFile file)
    : path_(std::move(path)), file_(std::move(file)) {}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, absl::Span<const TensorSpec> tensors) {
  std::vector<SafetensorsEntry> entries;
  for (const TensorSpec& tensor : tensors) {
    entries.push_back({tensor.name, std::string(DtypeName(tensor.dtype)),
                       tensor.shape, 0, 0});
  }
  FSDP_ASSIGN_OR_RETURN(entries, PlaceSafetensors(std::move(entries)));
  FSDP_ASSIGN_OR_RETURN(fsdp::PartialFile file,
                        fsdp::PartialFile::Create(path));
  std::unique_ptr<SafetensorsWriter> writer(
      new SafetensorsWriter(path, std::move(file)));
  const std::string header = FormatSafetensorsHeader(entries);
  FSDP_RETURN_IF_ERROR(fsdp::Annotate(
      WriteAt(writer->file_.descriptor(), 0, header.data(), header.size()),
      path));
  writer->data_begin_ = header.size();
  for (const SafetensorsEntry& entry : entries) {
    writer->missing_.insert(entry.name);
    if (!writer->entries_.emplace(entry.name, entry).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": tensor \"", entry.name, "\" is announced twice"));
    }
  }
  return writer;
}

absl::Status SafetensorsWriter::Write(absl::string_view name,
                                      const at::Tensor& tensor) {
  const auto found = entries_.find(name);
  if (found == entries_.end() || !missing_.contains(name)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": tensor \"", name,
                     found == entries_.end() ? "\" was not announced"
                                             : "\" is written twice"));
  }
  const SafetensorsEntry& entry = found->second;
  FSDP_RETURN_IF_ERROR(fsdp::Annotate(CheckMatches(entry, tensor), path_));
  const at::Tensor dense = tensor.detach().cpu().contiguous();
  FSDP_RETURN_IF_ERROR(
      fsdp::Annotate(WriteAt(file_.descriptor(), data_begin_ + entry.begin,
                             static_cast<const char*>(dense.const_data_ptr()),
                             entry.end - entry.begin),
                     absl::StrCat(path_, ": tensor \"", name, "\"")));
  missing_.erase(entry.name);
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (!missing_.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        path_, ": ", missing_.size(), " tensors were never written, \"",
        *missing_.begin(), "\" is one"));
  }
  return file_.Publish();
}

}  // namespace gpt
