// Files and folders of the real disk, for tests, by the standard library only,
// and bytes to put into them.
#ifndef BASE_FILES_TESTING_REAL_FILES_H_
#define BASE_FILES_TESTING_REAL_FILES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp::testing {

// Returns the path `name` among the test's own files, and removes what an
// earlier run has left there. One program at a time takes a name.
std::string FreePath(absl::string_view name);

// Makes an empty folder there, too.
std::string EmptyFolder(absl::string_view name);

// Returns the names of everything in `folder`, sorted.
std::vector<std::string> NamesIn(const std::string& folder);

// Ends the program if there is no such file.
std::string ReadWholeFile(const std::string& path);

// Returns what the files below `folder` hold, by their names relative to it.
std::map<std::string, std::string> ReadFilesBelow(const std::string& folder);

// Returns the same bytes each time. Others have another seed or size.
std::string RandomBytes(size_t size, uint32_t seed = 0);

}  // namespace fsdp::testing

#endif  // BASE_FILES_TESTING_REAL_FILES_H_
