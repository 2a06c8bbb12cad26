// Files as memory.
#ifndef EXAMPLES_LLAMA_DATA_MAPPED_FILE_H_
#define EXAMPLES_LLAMA_DATA_MAPPED_FILE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace llama {

// A regular file, read as its bytes are looked at; memory that the system can
// take back. Who cuts it short meanwhile ends the process (SIGBUS).
// Thread-safe.
class MappedFile {
 public:
  // Errors name `path`: what the system says, InvalidArgument for what is no
  // regular file.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(
      const std::string& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  absl::string_view bytes() const { return bytes_; }

 private:
  explicit MappedFile(absl::string_view bytes) : bytes_(bytes) {}

  const absl::string_view bytes_;  // of an empty file: not mapped
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_DATA_MAPPED_FILE_H_
