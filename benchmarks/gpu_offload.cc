// Training steps with parameters, gradients and optimizer states in the host's
// memory, stepped by the GPU, by the host or by what a measurement says is
// faster, in turns with the same on the GPU.
//   ./bazelw run --config=opt --config=cuda //benchmarks:gpu_offload
#include <cstdio>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/gpu_offload_run.h"
#include "benchmarks/gpu_run.h"
#include "fsdp/offload_options.h"

ABSL_FLAG(int, units, 8, "Units of the model, of two matrices each.");
ABSL_FLAG(int, dim, 4096, "Rows and columns of a matrix.");
ABSL_FLAG(int, rows, 4096,
          "Rows of a step in fp32; four times as many in bf16, which computes "
          "that much faster and more.");

namespace fsdp::benchmarks {
namespace {

const char* NameOf(StepOn step_on) {
  switch (step_on) {
    case StepOn::kDevice:
      return "stepped_on_device";
    case StepOn::kHost:
      return "stepped_on_host";
    case StepOn::kFaster:
      return "stepped_where_faster";
  }
  return "unknown";
}

void AddAll(const Place& place, int turns) {
  if (place.device.is_cpu()) {
    std::fputs("gpu_offload: on the CPU nothing rests elsewhere\n", stderr);
    return;
  }
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const StepOn step_on :
         {StepOn::kDevice, StepOn::kHost, StepOn::kFaster}) {
      OffloadCase what;
      what.units = absl::GetFlag(FLAGS_units);
      what.dim = absl::GetFlag(FLAGS_dim);
      what.rows = absl::GetFlag(FLAGS_rows) * (dtype == at::kBFloat16 ? 4 : 1);
      what.dtype = dtype;
      what.step_on = step_on;
      AddBenchmark(absl::StrCat("offload/", NameOf(step_on), "/",
                                dtype == at::kFloat ? "fp32" : "bf16"),
                   turns,
                   [what, place] { return MakeOffloadRun(what, place); });
    }
  }
}

}  // namespace
}  // namespace fsdp::benchmarks

int main(int argc, char** argv) {
  return fsdp::benchmarks::RunBenchmarks(argc, argv, fsdp::benchmarks::AddAll);
}
