// Measures what a disk gives to a program that only keeps it busy.
#ifndef BENCHMARKS_PLAIN_FILE_H_
#define BENCHMARKS_PLAIN_FILE_H_

#include <liburing.h>

#include <cstdint>
#include <string>

namespace fsdp {

// An unnamed file whose space is reserved and written once. It moves blocks by
// io_uring, past the page cache if the file system can, `depth` of them in
// flight. It is for benchmarks: it checks instead of returning errors.
class PlainFile {
 public:
  PlainFile(const std::string& directory, int64_t bytes, int64_t block_bytes,
            int depth);
  ~PlainFile();
  PlainFile(const PlainFile&) = delete;
  PlainFile& operator=(const PlainFile&) = delete;

  // Reads the first `read_bytes` and writes the last `write_bytes`, in order
  // and at the same time, in whole blocks of `memory`, which starts at a page
  // and is as large as the file. Returns seconds.
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
