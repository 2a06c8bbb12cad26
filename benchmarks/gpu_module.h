// Modules whose random values are drawn by the device that they are for: the
// host takes seconds for a billion of them.
#ifndef BENCHMARKS_GPU_MODULE_H_
#define BENCHMARKS_GPU_MODULE_H_

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include "benchmarks/gpu_run.h"
#include "fsdp/deferred/deferred_init.h"

namespace fsdp::benchmarks {

// Within a DeferredInit: parameters of `module` become those of `device` and
// `dtype`, and the layers' own initialisation is recorded once more, for there.
// Layers: linear, embedding, layer norm.
void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module);

// What `make` gives, in `dtype` on the device of `place`, deferred:
// FullyShard() gives values unit by unit, Materialize() all at once. The same
// values every time.
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

#endif  // BENCHMARKS_GPU_MODULE_H_
