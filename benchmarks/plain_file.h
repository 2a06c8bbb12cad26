// What a disk gives to a program that does nothing but keep it busy.
#ifndef BENCHMARKS_PLAIN_FILE_H_
#define BENCHMARKS_PLAIN_FILE_H_

#include <liburing.h>

#include <cstdint>
#include <string>

namespace fsdp {

// An unnamed file whose space is reserved and written once; past the page cache
// where the file system can, by io_uring, with `depth` blocks in flight. Checks
// instead of reporting: for benchmarks.
class PlainFile {
 public:
  PlainFile(const std::string& directory, int64_t bytes, int64_t block_bytes,
            int depth);
  ~PlainFile();
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;

  // Reads the first `read_bytes` and writes the last `write_bytes`, in order
  // and at the same time, whole blocks of `memory`, which starts at a page and
  // is as large as the file. Returns seconds.
  double Move(int64_t read_bytes, int64_t write_bytes, char* memory);

 private:
  void Start(bool write, char* memory, int64_t offset);
  void AwaitOne();

  const int64_t bytes_;
  const int64_t block_bytes_;
  const int depth_;
  int descriptor_ = -1;
  io_uring ring_ = {};
};

}  // namespace fsdp

#endif  // BENCHMARKS_PLAIN_FILE_H_
