// The limit on the size of files (`ulimit -f`) as an error like any other.
#ifndef BASE_FILE_SIZE_ERRORS_H_
#define BASE_FILE_SIZE_ERRORS_H_

namespace fsdp {

// While one exists, what this thread writes past the limit fails with EFBIG.
// Without, SIGXFSZ ends the process, and nothing says why. Threads that are
// started meanwhile inherit it.
class FileSizeErrors {
 public:
  FileSizeErrors();
  FileSizeErrors(const FileSizeErrors&) = delete;
  FileSizeErrors& operator=(const FileSizeErrors&) = delete;
  ~FileSizeErrors();  // of the thread that made it; restores what was

 private:
  bool was_blocked_;
};

}  // namespace fsdp

#endif  // BASE_FILE_SIZE_ERRORS_H_
