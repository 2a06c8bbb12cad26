#include "examples/llama/data/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/output_file.h"
#include "base/status_macros.h"

namespace llama {

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
  if (status.st_size > 0) {  // none cannot be mapped
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

}  // namespace llama
