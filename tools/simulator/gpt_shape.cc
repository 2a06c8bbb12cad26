#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "fsdp/simulator/model_shape.h"
#include "tools/simulator/models.h"

namespace fsdp::simulator {
namespace {

// Up to these the bytes of a GPT fit 64 bits.
constexpr int64_t kMostLayers = int64_t{1} << 16;
constexpr int64_t kLargestDim = int64_t{1} << 20;
constexpr int64_t kLargestCount = int64_t{1} << 28;

absl::Status CheckSize(const char* what, int64_t value, int64_t least,
                       int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a GPT with ", what, " ",
                                                 value, ": it has to be from ",
                                                 least, " to ", most));
}

void AddLinear(const std::string& name, int64_t in, int64_t out,
               UnitShape& unit) {
  unit.parameters.push_back(Parameter(name + ".weight", {out, in}));
  unit.parameters.push_back(Parameter(name + ".bias", {out}));
}

void AddNorm(const std::string& name, int64_t dim, UnitShape& unit) {
  unit.parameters.push_back(Parameter(name + ".weight", {dim}));
  unit.parameters.push_back(Parameter(name + ".bias", {dim}));
}

// In the order of examples/gpt/model/model.cc.
UnitShape MakeBlock(const GptShape& gpt, int64_t index) {
  UnitShape block;
  block.name = absl::StrCat("blocks.", index);
  block.parent = 0;
  AddNorm("ln1", gpt.dim, block);
  AddLinear("qkv", gpt.dim, 3 * gpt.dim, block);
  AddLinear("proj", gpt.dim, gpt.dim, block);
  AddNorm("ln2", gpt.dim, block);
  AddLinear("fc", gpt.dim, 4 * gpt.dim, block);
  AddLinear("out", 4 * gpt.dim, gpt.dim, block);
  const double dim = static_cast<double>(gpt.dim);
  const double seq = static_cast<double>(gpt.seq);
  const double tokens = static_cast<double>(gpt.batch) * seq;
  const double linear = 2 * tokens * 12 * dim * dim;
  const double attention = 4 * tokens * seq * dim;
  block.forward.flops = linear + attention;
  block.backward.flops = (gpt.recompute ? 3 : 2) * block.forward.flops;
  return block;
}

}  // namespace

absl::StatusOr<ModelShape> MakeGpt(const GptShape& gpt) {
  FSDP_RETURN_IF_ERROR(CheckSize("layers", gpt.layers, 0, kMostLayers));
  FSDP_RETURN_IF_ERROR(CheckSize("dim", gpt.dim, 1, kLargestDim));
  FSDP_RETURN_IF_ERROR(CheckSize("vocab", gpt.vocab, 1, kLargestCount));
  FSDP_RETURN_IF_ERROR(CheckSize("seq", gpt.seq, 1, kLargestCount));
  FSDP_RETURN_IF_ERROR(CheckSize("batch", gpt.batch, 1, kLargestCount));
  ModelShape model;
  UnitShape& root = model.units.emplace_back();
  root.name = "root";
  root.parameters.push_back(Parameter("wte.weight", {gpt.vocab, gpt.dim}));
  root.parameters.push_back(Parameter("wpe.weight", {gpt.seq, gpt.dim}));
  AddNorm("ln", gpt.dim, root);
  root.parameters.push_back(Parameter("head.weight", {gpt.vocab, gpt.dim}));
  root.forward.flops =
      2.0 * static_cast<double>(gpt.batch) * static_cast<double>(gpt.seq) *
      static_cast<double>(gpt.vocab) * static_cast<double>(gpt.dim);
  root.backward.flops = 2 * root.forward.flops;
  for (int64_t i = 0; i < gpt.layers; ++i) {
    model.units.push_back(MakeBlock(gpt, i));
  }
  return model;
}

}  // namespace fsdp::simulator
