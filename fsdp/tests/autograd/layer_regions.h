// Layers in regions that backward recomputes.
#ifndef FSDP_TESTS_AUTOGRAD_LAYER_REGIONS_H_
#define FSDP_TESTS_AUTOGRAD_LAYER_REGIONS_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/tanh.h>

#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/layered_net.h"

namespace fsdp::testing {

// `region` calls a function of a tensor with one, as a region. Regions outlive
// the call, so they hold copies of `region` and of `first`.

template <typename Region>
at::Tensor LayerInThree(const Region& region, Layer& layer,
                        const at::Tensor& x) {
  at::Tensor y =
      region([&](const at::Tensor& x) { return layer.fc->forward(x); }, x);
  y = region([](const at::Tensor& y) { return at::tanh(y); }, y);
  y = region([&](const at::Tensor& y) { return layer.out->forward(y); }, y);
  return x + y;
}

// Runs each of three layers in a region inside that of the layer before;
// `first` computes what precedes the first layer.
template <typename Region, typename First>
at::Tensor LayersNested(Region region, First first, Net& net,
                        const at::Tensor& x) {
  return region(
      [region, first, &net](const at::Tensor& x) {
        const at::Tensor y = Forward(net.layers[0], first(x));
        return region(
            [region, &net](const at::Tensor& y) {
              const at::Tensor z = Forward(net.layers[1], y);
              return region(
                  [&net](const at::Tensor& z) {
                    return Forward(net.layers[2], z);
                  },
                  z);
            },
            y);
      },
      x);
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTS_AUTOGRAD_LAYER_REGIONS_H_
