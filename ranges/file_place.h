// The place of bytes in one of several files.
#ifndef RANGES_FILE_PLACE_H_
#define RANGES_FILE_PLACE_H_

#include <cstdint>

namespace fsdp {

struct FilePlace {
  int64_t file = 0;    // the index in a list of files
  int64_t offset = 0;  // bytes from the beginning of the file
  int64_t bytes = 0;
};

}  // namespace fsdp

#endif  // RANGES_FILE_PLACE_H_
