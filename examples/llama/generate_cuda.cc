// The program of generate.cc with CUDA.
//   bazel run --config=cuda //examples/llama:generate_cuda -- --device=cuda
#include "base/device_graph.h"
#include "examples/llama/generate_run.h"

int main(int argc, char** argv) {
  return llama::GenerateProgram(argc, argv, fsdp::MakeCudaGraph);
}
