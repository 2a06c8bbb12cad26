#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "planner/simulator/simulator.h"

namespace fsdp::simulator {

int64_t ModelShape::num_elements() const {
  int64_t sum = 0;
  for (const UnitShape& unit : units) {
    for (const flat_param::ParameterSpec& parameter : unit.parameters) {
      int64_t numel = 1;
      for (const int64_t size : parameter.sizes) numel *= size;
      sum += numel;
    }
  }
  return sum;
}

flat_param::ParameterSpec Parameter(std::string name,
                                    std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<int64_t>(1, sizes[i]);
  }
  return {std::move(name), std::move(sizes), std::move(strides)};
}

namespace {

// The bytes of a GPT up to these sizes fit 64 bits.
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

void AddPair(const std::string& name, std::vector<int64_t> weight,
             UnitShape& unit) {
  const int64_t out = weight.front();
  unit.parameters.push_back(Parameter(name + ".weight", std::move(weight)));
  unit.parameters.push_back(Parameter(name + ".bias", {out}));
}

// The parameters are in the order of testing/gpt/model.cc.
UnitShape MakeBlock(const GptShape& gpt, int64_t index) {
  UnitShape block;
  block.name = absl::StrCat("blocks.", index);
  block.parent = 0;
  AddPair("ln1", {gpt.dim}, block);
  AddPair("qkv", {3 * gpt.dim, gpt.dim}, block);
  AddPair("proj", {gpt.dim, gpt.dim}, block);
  AddPair("ln2", {gpt.dim}, block);
  AddPair("fc", {4 * gpt.dim, gpt.dim}, block);
  AddPair("out", {gpt.dim, 4 * gpt.dim}, block);
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
  AddPair("ln", {gpt.dim}, root);
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

namespace {

using ::fsdp::flat_param::FlatLayout;

absl::Status CheckDivides(const char* what, int size, int ranks) {
  if (size >= 0 && (size == 0 || ranks % size == 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, " is ", size, ", which does not divide the ", ranks, " ranks"));
}

absl::Status CheckOptions(const ShardingOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckDivides("the number of ranks to shard over",
                                    options.shard_ranks, options.ranks));
  const bool replicated = options.strategy == Strategy::kReplicated;
  if (replicated && options.shard_ranks > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a model that is whole on every rank is not sharded over ",
                     options.shard_ranks));
  }
  if (options.backward_group_size == 0) return absl::OkStatus();
  if (options.strategy != Strategy::kFull) {
    return absl::InvalidArgumentError(
        "a group for backward needs the strategy that frees units after "
        "forward: others gather nothing for backward");
  }
  return CheckDivides(
      "the size of the group for backward", options.backward_group_size,
      options.shard_ranks == 0 ? options.ranks : options.shard_ranks);
}

// As in GradientLayout: the shard, a flag per parameter, padding.
int64_t SegmentNumel(const FlatLayout& layout, int64_t element_size) {
  const int64_t alignment =
      std::max<int64_t>(1, FlatLayout::kAlignmentBytes / element_size);
  const int64_t used = layout.shard_numel() + layout.num_parameters();
  return (used + alignment - 1) / alignment * alignment;
}

void AddUnit(const UnitShape& unit, const FlatLayout& layout,
             const ShardingOptions& options, ShardedShape& shape) {
  ScheduledUnit& scheduled = shape.units.emplace_back();
  scheduled.name = unit.name;
  scheduled.parent = unit.parent;
  scheduled.reshard_after_forward = options.strategy == Strategy::kFull &&
                                    (unit.parent >= 0 || options.reshard_root);
  scheduled.keeps_part = shape.part.size > 0;
  scheduled.keep_until_sync = options.strategy == Strategy::kOptimizer ||
                              options.strategy == Strategy::kReplicated;
  scheduled.replicated = shape.replicate.size > 1;
  scheduled.sharded = shape.shard.size > 1;
  UnitMessages& messages = shape.messages.emplace_back();
  messages.gather = layout.padded_numel() * options.compute_bytes;
  const int64_t segment = SegmentNumel(layout, options.reduce_bytes);
  messages.segment = segment * options.reduce_bytes;
  messages.reduce = messages.segment * shape.shard.size;
  messages.gradients = layout.numel() * options.compute_bytes;
  UnitBytes& bytes = shape.bytes.emplace_back();
  bytes.trainable = layout.num_parameters() > 0;
  bytes.shard = layout.shard_numel() * options.stored_bytes;
  // A sum may become the gradient as it is, with its flags.
  if (bytes.trainable) bytes.gradient = segment * options.stored_bytes;
  const bool is_shard = shape.shard.size == 1 && !shape.casts;
  bytes.ranks = shape.shard.size;
  if (!is_shard && messages.gather > 0) bytes.unsharded = {messages.gather};
  if (shape.part.size > 0) bytes.part = messages.gather / shape.part.size;
  if (messages.reduce > 0) bytes.reduce_buffers = {messages.reduce};
  bytes.takes_gradients = is_shard && shape.replicate.size == 1 &&
                          options.reduce_bytes == options.stored_bytes;
  shape.work.push_back(unit);
}

}  // namespace

absl::StatusOr<ShardedShape> Shard(const ModelShape& model,
                                   const ShardingOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckOptions(options));
  ShardedShape shape;
  shape.ranks = options.ranks;
  shape.casts = options.stored_bytes != options.compute_bytes;
  shape.shard.size =
      options.shard_ranks == 0 ? options.ranks : options.shard_ranks;
  if (options.strategy == Strategy::kReplicated) shape.shard.size = 1;
  shape.replicate = {options.ranks / shape.shard.size, shape.shard.size};
  const int group = options.backward_group_size;  // of all: keeps no part
  shape.part.size = group < shape.shard.size ? group : 0;
  const int element_size =
      std::min(options.stored_bytes, options.compute_bytes);
  for (const UnitShape& unit : model.units) {
    absl::StatusOr<FlatLayout> layout =
        FlatLayout::Create(unit.parameters, element_size, shape.shard.size);
    FSDP_RETURN_IF_ERROR(
        Annotate(layout.status(), absl::StrCat("unit ", unit.name)));
    AddUnit(unit, *layout, options, shape);
  }
  return shape;
}

}  // namespace fsdp::simulator
