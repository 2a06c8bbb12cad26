// Files of tests, in memory.
#ifndef CHECKPOINT_TORCH_ARCHIVE_TESTING_MEMORY_FILE_H_
#define CHECKPOINT_TORCH_ARCHIVE_TESTING_MEMORY_FILE_H_

#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/torch_archive/archive_layout.h"
#include "checkpoint/torch_archive/zip_reader.h"

namespace fsdp::checkpoint::testing {

// Reads from `bytes`, which outlive it; stops the program when asked for what
// lies outside.
ReadAt ReadFrom(absl::string_view bytes);

// The zip with each tensor's bytes.
std::string Assemble(const ArchiveLayout& layout,
                     absl::Span<const std::string> payloads);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TORCH_ARCHIVE_TESTING_MEMORY_FILE_H_
