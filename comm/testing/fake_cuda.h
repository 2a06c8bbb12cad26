// CUDA's runtime without a GPU. The linker prefers a program's functions to
// those of libraries.
#ifndef COMM_TESTING_FAKE_CUDA_H_
#define COMM_TESTING_FAKE_CUDA_H_

#include <map>
#include <string>
#include <vector>

namespace fsdp::comm::testing {

// One device, on which all work is done at once, with the functions for
// devices, streams, events and captures of streams that groups of ranks need.
// Counts calls, and knows what CUDA forbids about captures. The process has
// one. Thread-safe.
class FakeCuda {
 public:
  // Forgets all calls, captures and faults.
  static void Reset();

  // Returns how often each function has been called since the last time.
  static std::map<std::string, int> TakeCalls();

  // Begins or ends a capture of the legacy default stream and of all streams
  // that wait for it.
  static void BeginCapture();
  static void EndCapture();

  // Returns the calls that CUDA forbids: to query an event of a capture; to
  // query any event during a capture, except in relaxed mode; to wait outside a
  // capture for an event of it.
  static std::vector<std::string> Faults();

  // Returns how many threads the process has started.
  static int num_threads();
};

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_FAKE_CUDA_H_
