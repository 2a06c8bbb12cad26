// CUDA's runtime without a GPU: functions of a program come before those of
// libraries.
#ifndef COMM_TESTING_FAKE_CUDA_H_
#define COMM_TESTING_FAKE_CUDA_H_

#include <map>
#include <string>
#include <vector>

namespace fsdp::comm::testing {

// One device, on which everything is done at once: devices, streams, events and
// captures of streams, as far as groups of ranks need them. Counts calls, and
// knows what CUDA forbids about captures. Of the whole process; thread-safe.
class FakeCuda {
 public:
  // Begins anew.
  static void Reset();

  // How often each function has been called, since the last time.
  static std::map<std::string, int> TakeCalls();

  // The legacy default stream is being captured from now on, and with it
  // whatever waits for it; or the capture ends.
  static void BeginCapture();
  static void EndCapture();

  // What has been forbidden: to ask for an event of a capture; to ask for any
  // while there is one, but in the relaxed mode; to wait outside a capture for
  // an event of it.
  static std::vector<std::string> Faults();

  // Threads that the process has started.
  static int num_threads();
};

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_FAKE_CUDA_H_
