#include "checkpoint/dcp/testing/samples.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/real_files.h"

namespace fsdp::checkpoint::testing {

std::string PutDcpSample(FileSystem& files, absl::string_view name) {
  const std::string folder = absl::StrCat("/", name);
  const std::string from =
      absl::StrCat("checkpoint/dcp/testing/data/", name, "/");
  FSDP_CHECK(files.MakeFolder(folder).ok());
  for (const std::string& file : NamesIn(from)) {
    // Globs do not see names that begin with a dot.
    const std::string to = file == "metadata" ? "/.metadata" : "/" + file;
    FSDP_CHECK(
        ReplaceFile(files, folder + to, ReadWholeFile(from + file)).ok());
  }
  return folder;
}

}  // namespace fsdp::checkpoint::testing
