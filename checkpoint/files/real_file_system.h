// The disk of this machine.
#ifndef CHECKPOINT_FILES_REAL_FILE_SYSTEM_H_
#define CHECKPOINT_FILES_REAL_FILE_SYSTEM_H_

#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

// By Linux' calls: O_DIRECT where the file system has it, fdatasync(2),
// flock(2). Links are followed on the way to a file, not as its last name where
// something is created or removed.
FileSystem& RealFileSystem();

// `files`; null: RealFileSystem().
FileSystem& OrReal(FileSystem* files);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_REAL_FILE_SYSTEM_H_
