// Files and folders of the real disk, for tests: by the standard library alone.
#ifndef CHECKPOINT_FILES_TESTING_REAL_FILES_H_
#define CHECKPOINT_FILES_TESTING_REAL_FILES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp::checkpoint::testing {

// `name` among the test's own files. What an earlier run has left there is
// removed, so that there is nothing; one program at a time takes a name.
std::string FreePath(absl::string_view name);

// The same, where there is an empty folder then.
std::string EmptyFolder(absl::string_view name);

// Of all that is in `folder`, sorted.
std::vector<std::string> NamesIn(const std::string& folder);

// Stops the program where there is no such file.
std::string ReadWholeFile(const std::string& path);

// What the files below `folder` hold, by their names relative to it.
std::map<std::string, std::string> ReadFilesBelow(const std::string& folder);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_FILES_TESTING_REAL_FILES_H_
