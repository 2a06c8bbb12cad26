// Parts that all benchmarks for a GPU share. The device is an argument, so that
// the same code runs, and is tested, without a GPU.
#ifndef BENCHMARKS_GPU_RUN_H_
#define BENCHMARKS_GPU_RUN_H_

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

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
#include "fsdp/deferred/deferred_init.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {

// The device and the number of ranks of a benchmark.
struct Place {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int ranks = 1;
};

// Parses "cuda", "cuda:1" or "cpu". InvalidArgument: there is no such name.
// FailedPrecondition: this program or machine has no such device.
absl::StatusOr<c10::Device> ParseDevice(absl::string_view name);

// Returns rank 0 of as many ranks as `place` has, all played by this process.
std::shared_ptr<comm::Communicator> LoopbackGroup(const Place& place);

// The counts of LibTorch's allocator of a device, if it counts.
class DeviceMemory {
 public:
  explicit DeviceMemory(c10::Device device) : device_(device) {}
  bool known() const;
  int64_t allocated() const;  // bytes; 0 if not known
  int64_t peak() const;       // bytes since ResetPeak(); 0 if not known
  void ResetPeak() const;

 private:
  const c10::Device device_;
};

// Seconds of one call that gives work to a device.
struct CallTime {
  double host = 0;   // until the host has queued all of it
  double whole = 0;  // until the device has done it
};
CallTime Time(c10::Device device, const std::function<void()>& call);

// Returns the largest difference between losses of two trainings, relative to
// the second one's. Throws StatusError where trainings in `dtype` would not
// differ so much by rounding.
double LossDifference(absl::string_view name,
                      const std::vector<at::Tensor>& losses,
                      absl::string_view other_name,
                      const std::vector<at::Tensor>& other,
                      at::ScalarType dtype);

// The results of a benchmark, by name.
using Figures = std::map<std::string, double>;

// Contenders that run in turns, already warmed up.
class TurnRun {
 public:
  virtual ~TurnRun() = default;
  // Runs all contenders once; returns the seconds of the one to be benchmarked.
  virtual double Turn() = 0;
  // Returns the figures of all turns so far, at least one. Throws StatusError
  // if the contenders did not do the same.
  virtual Figures GetFigures() const = 0;
};
using MakeRun = std::function<std::unique_ptr<TurnRun>()>;

// Adds a benchmark to Google Benchmark's report: the run's median time and
// figures, or what it has thrown.
void AddBenchmark(const std::string& name, int turns, MakeRun make);

// Is all of main(): reads flags (--device, --ranks, --turns, Google Benchmark's
// and the program's), calls `add`, runs the benchmarks, and returns the exit
// code, 2 if a flag is wrong or there is no such device.
int RunBenchmarks(int argc, char** argv,
                  const std::function<void(const Place&, int turns)>& add);

// The data of a step: rows of numbers that count upwards, and the next of each.
struct CountingRows {
  CountingRows(const gpt::GptConfig& model, int64_t batch, c10::Device device);
  at::Tensor tokens;   // [batch, model.seq]
  at::Tensor targets;  // likewise
};

// Returns the loss, computed in fp32.
at::Tensor LossOf(const at::Tensor& logits, const CountingRows& rows);

// Call it within a DeferredInit: moves the parameters of `module` to `device`
// and `dtype`, and records the initialization of its layers again for there.
// Knows linear layers, embeddings and layer norms. The device draws the values:
// the host takes seconds for a billion of them.
void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module);

// Returns what `make` returns, in `dtype` on the device of `place`, deferred:
// FullyShard() gives it values unit by unit, Materialize() all at once. The
// values are the same every time.
template <typename Make>
auto MakeOn(const Place& place, at::ScalarType dtype, const Make& make) {
  at::manual_seed(0);
  decltype(make()) module;
  {
    const DeferredInit deferred;
    module = make();
    DrawOn(place.device, dtype, *module);
  }
  return module;
}

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_RUN_H_
