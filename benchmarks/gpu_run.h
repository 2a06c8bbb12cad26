// What the benchmarks for a GPU have in common. The device is an argument: the
// same code runs, and is tested, where there is none.
#ifndef BENCHMARKS_GPU_RUN_H_
#define BENCHMARKS_GPU_RUN_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace fsdp::benchmarks {

// Where a benchmark runs.
struct Place {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int ranks = 1;
};

// "cuda", "cuda:1", "cpu". InvalidArgument: no such name; FailedPrecondition:
// this program or machine has no such device.
absl::StatusOr<c10::Device> ParseDevice(absl::string_view name);

// Rank 0 of as many as `place` has, all of them played by this process.
std::shared_ptr<comm::Communicator> LoopbackGroup(const Place& place);

// What LibTorch's allocator of the device says; none where it keeps no count.
class DeviceMemory {
 public:
  explicit DeviceMemory(c10::Device device) : device_(device) {}
  bool known() const;
  int64_t allocated() const;  // 0 where not known
  int64_t peak() const;       // likewise, since ResetPeak()
  void ResetPeak() const;

 private:
  const c10::Device device_;
};

// Seconds of one call of what a device is given.
struct CallTime {
  double host = 0;   // until the host has given it all
  double whole = 0;  // until the device has done it
};
CallTime Time(c10::Device device, const std::function<void()>& call);

double Median(std::vector<double> values);

// Name and value of what a benchmark found.
using Figures = std::map<std::string, double>;

// Contenders in turns. Made warm.
class TurnRun {
 public:
  virtual ~TurnRun() = default;
  // All contenders once; seconds of the one that the benchmark is about.
  virtual double Turn() = 0;
  // Of all turns so far, one at least. Throws StatusError where the contenders
  // did not do the same.
  virtual Figures GetFigures() const = 0;
};
using MakeRun = std::function<std::unique_ptr<TurnRun>()>;

// The run's median time and figures in Google Benchmark's report, or what it
// threw.
void AddBenchmark(const std::string& name, int turns, MakeRun make);

// What main() does: flags (--device, --ranks, --turns, Google Benchmark's and
// those of the program), then `add`, then the benchmarks. The exit code: 2
// where a flag is wrong or there is no such device.
int RunBenchmarks(int argc, char** argv,
                  const std::function<void(const Place&, int turns)>& add);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_RUN_H_
