// Compares the operators of //device_ops with a copy, in bytes read and written
// per second: on the CPU, and on CUDA in a build with --config=cuda where there
// is a GPU.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "device_ops/block_quantization.h"
#include "device_ops/pack.h"

namespace fsdp::device_ops {
namespace {

// Returns the width of a block of a GPT; a GPU's caches do not hold it.
int64_t WidthOn(c10::Device device) { return device.is_cpu() ? 768 : 4096; }

constexpr int64_t kRanks = 4;
constexpr int64_t kBlock = 256;
// Calls before the host waits for the device.
constexpr int kCalls = 10;

at::TensorOptions On(c10::Device device, at::ScalarType dtype) {
  return at::TensorOptions().device(device).dtype(dtype);
}

void Measure(benchmark::State& state, c10::Device device, int64_t bytes,
             const std::function<void()>& call) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const int calls = device.is_cpu() ? 1 : kCalls;
  const auto run = [&] {
    for (int i = 0; i < calls; ++i) call();
    if (!device.is_cpu()) guard.getStream(device).synchronize();
  };
  run();  // makes pages, kernels and caches
  for (auto _ : state) run();
  state.SetBytesProcessed(state.iterations() * calls * bytes);
}

struct Gradients {
  Gradients(c10::Device device, at::ScalarType from, at::ScalarType to) {
    const int64_t width = WidthOn(device);
    const int64_t square = width * width;
    int64_t size = 0;
    for (int64_t numel :
         {width, width, 3 * square, 3 * width, square, width, width, width,
          4 * square, 4 * width, 4 * square, width}) {
      sources.push_back(at::ones({numel}, On(device, from)));
      size += numel;
    }
    const int64_t shard = size / kRanks;
    const int64_t flags = static_cast<int64_t>(sources.size());
    const int64_t segment = (shard + flags + 7) / 8 * 8;
    int64_t position = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
      for (int64_t done = 0; done < sources[i].numel();) {
        const int64_t rank = position / shard;
        const int64_t numel =
            std::min(sources[i].numel() - done, (rank + 1) * shard - position);
        packing.AddPiece(static_cast<int64_t>(i), done,
                         rank * segment + position % shard, numel);
        done += numel;
        position += numel;
      }
    }
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const int64_t end = rank * segment + shard;
      packing.AddOnes(end, end + flags);
      packing.AddZeros(end + flags, (rank + 1) * segment);
    }
    out = at::empty({kRanks * segment}, On(device, to));
    bytes = size * static_cast<int64_t>(c10::elementSize(from)) +
            static_cast<int64_t>(out.nbytes());
  }

  std::vector<at::Tensor> sources;
  Packing packing;
  at::Tensor out;
  int64_t bytes = 0;
};

// Packs as PyTorch's FSDP2 does, which sends no flags along.
void ChunkCat(benchmark::State& state, c10::Device device, at::ScalarType from,
              at::ScalarType to) {
  const Gradients gradients(device, from, to);
  int64_t bytes = 0, size = 0;
  for (const at::Tensor& source : gradients.sources) {
    bytes += static_cast<int64_t>(source.nbytes());
    size += source.numel();
  }
  at::Tensor out = at::empty({kRanks, size / kRanks}, On(device, to));
  bytes += static_cast<int64_t>(out.nbytes());
  Measure(state, device, bytes, [&] {
    at::_chunk_cat_out(out, gradients.sources, /*dim=*/0, kRanks);
  });
}

struct Blocks {
  Blocks(c10::Device device, at::ScalarType dtype, int64_t rows, int64_t size)
      : numbers(at::ones({rows, size}, On(device, dtype))),
        values(at::empty({rows, size}, On(device, at::kChar))),
        scales(at::empty({rows, NumBlocks(size, kBlock)},
                         On(device, at::kFloat))) {
    Quantize(numbers, kBlock, values, scales);
  }

  int64_t bytes() const {
    return static_cast<int64_t>(numbers.nbytes() + values.nbytes() +
                                scales.nbytes());
  }

  const at::Tensor numbers;
  const at::Tensor values;
  const at::Tensor scales;
};

void RegisterAll(c10::Device device) {
  struct Types {
    const char* name;
    at::ScalarType from;
    at::ScalarType to;
  };
  const std::string where = device.is_cpu() ? "cpu/" : "cuda/";
  const auto add = [&](const std::string& name, auto run) {
    benchmark::RegisterBenchmark((where + name).c_str(), run)->UseRealTime();
  };
  const int64_t size = 12 * WidthOn(device) * WidthOn(device);
  add("copy", [=](benchmark::State& state) {
    const at::Tensor in = at::ones({4 * size}, On(device, at::kByte));
    const at::Tensor out = at::empty_like(in);
    Measure(state, device, 8 * size, [&] { out.copy_(in); });
  });
  for (const Types& types :
       {Types{"float_to_float", at::kFloat, at::kFloat},
        Types{"float_to_bf16", at::kFloat, at::kBFloat16},
        Types{"bf16_to_float", at::kBFloat16, at::kFloat},
        Types{"bf16_to_bf16", at::kBFloat16, at::kBFloat16}}) {
    add(std::string("pack/") + types.name, [=](benchmark::State& state) {
      const Gradients gradients(device, types.from, types.to);
      Measure(state, device, gradients.bytes, [&] {
        Pack(gradients.out, gradients.sources, gradients.packing, /*scale=*/1);
      });
    });
  }
  for (const Types& types : {Types{"float", at::kFloat, at::kFloat},
                             Types{"bf16", at::kBFloat16, at::kBFloat16}}) {
    const std::string name = types.name;
    const at::ScalarType dtype = types.from;
    add("quantize/" + name, [=](benchmark::State& state) {
      const Blocks blocks(device, dtype, 1, size);
      Measure(state, device, blocks.bytes(), [&] {
        Quantize(blocks.numbers, kBlock, blocks.values, blocks.scales);
      });
    });
    add("dequantize/" + name, [=](benchmark::State& state) {
      const Blocks blocks(device, dtype, 1, size);
      Measure(state, device, blocks.bytes(), [&] {
        Dequantize(blocks.numbers, blocks.values, blocks.scales, kBlock);
      });
    });
    add("dequantize_sum/" + name, [=](benchmark::State& state) {
      const Blocks blocks(device, dtype, kRanks, size / kRanks);
      const at::Tensor out = at::empty({size / kRanks}, On(device, dtype));
      const auto bytes = static_cast<int64_t>(
          blocks.values.nbytes() + blocks.scales.nbytes() + out.nbytes());
      Measure(state, device, bytes, [&] {
        DequantizeSum(out, blocks.values, blocks.scales, kBlock,
                      {1.0 / kRanks, false});
      });
    });
  }
  // These come last: if LibTorch refuses a combination, that ends the program.
  for (const Types& types :
       {Types{"float_to_float", at::kFloat, at::kFloat},
        Types{"bf16_to_float", at::kBFloat16, at::kFloat},
        Types{"bf16_to_bf16", at::kBFloat16, at::kBFloat16}}) {
    add(std::string("chunk_cat/") + types.name, [=](benchmark::State& state) {
      ChunkCat(state, device, types.from, types.to);
    });
  }
}

}  // namespace
}  // namespace fsdp::device_ops

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  fsdp::device_ops::RegisterAll(c10::Device(c10::kCPU));
  if (c10::impl::hasDeviceGuardImpl(c10::kCUDA) &&
      c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount() > 0) {
    fsdp::device_ops::RegisterAll(c10::Device(c10::kCUDA, 0));
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
