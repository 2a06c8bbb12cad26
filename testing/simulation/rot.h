// A disk that loses a bit.
#ifndef TESTING_SIMULATION_ROT_H_
#define TESTING_SIMULATION_ROT_H_

#include <cstdint>
#include <string>

#include "checkpoint/files/file_system.h"

namespace fsdp::simulation {

class Rot {
 public:
  // Turns a bit of the newest checkpoint below /run; `choice` says which.
  // Returns false if there is no checkpoint.
  bool Flip(checkpoint::FileSystem& disk, int64_t choice);
  // Turns it back if the file is still the same one.
  void FlipBack(checkpoint::FileSystem& disk);

 private:
  std::string path_;
  std::string rotten_;  // all its bytes
  int64_t bit_ = 0;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_ROT_H_
