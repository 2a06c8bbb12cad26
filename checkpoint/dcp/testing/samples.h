// The folders of `data`, where those who load them look.
#ifndef CHECKPOINT_DCP_TESTING_SAMPLES_H_
#define CHECKPOINT_DCP_TESTING_SAMPLES_H_

#include <string>

#include "absl/strings/string_view.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::testing {

// What Python wrote into data/NAME, as the folder "/NAME" of `files`, whose
// path it returns. Stops the program where there is none, or one already.
std::string PutDcpSample(FileSystem& files, absl::string_view name);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_DCP_TESTING_SAMPLES_H_
