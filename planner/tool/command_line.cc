#include "planner/tool/command_line.h"

#include <cstdint>
#include <map>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/command_line.h"
#include "base/status_macros.h"

ABSL_FLAG(std::string, ranks, "8,64,512,4096",
          "Numbers of ranks to simulate, up to 16384 each.");

ABSL_FLAG(int64_t, layers, fsdp::simulator::GptShape().layers,
          "Blocks of the GPT, a unit each.");
ABSL_FLAG(int64_t, dim, fsdp::simulator::GptShape().dim, "Width of the GPT.");
ABSL_FLAG(int64_t, vocab, fsdp::simulator::GptShape().vocab,
          "Different tokens of the GPT.");
ABSL_FLAG(int64_t, seq, fsdp::simulator::GptShape().seq, "Tokens per row.");
ABSL_FLAG(int64_t, batch, fsdp::simulator::GptShape().batch,
          "Rows per rank and backward.");
ABSL_FLAG(bool, recompute, false,
          "Blocks of the GPT are computed again in backward.");

ABSL_FLAG(std::string, sharding, "full",
          "full: units are whole while they compute. gradients: from forward "
          "to backward (no reshard after forward). optimizer: until a backward "
          "synchronises. replicated: always.");
ABSL_FLAG(int, shard_ranks, 0,
          "Ranks that hold one copy of the model together; the others hold "
          "copies of it (hybrid sharding). 0: all ranks.");
ABSL_FLAG(bool, reshard_root, false,
          "Free the root between forward and backward, as other units are.");
ABSL_FLAG(int, backward_group, 0,
          "Keep, between forward and backward, what so many consecutive ranks "
          "need to gather among themselves. 0: the shard only.");
ABSL_FLAG(bool, forward_prefetch, true,
          "Gather the next unit while one computes forward.");
ABSL_FLAG(bool, backward_prefetch, true,
          "Gather the next unit while one computes backward.");
ABSL_FLAG(int, max_gathered_units, 2,
          "Units gathered at a time besides the root, at most.");
ABSL_FLAG(int, max_reduce_buffers, 2, "Reductions in flight, at most.");
ABSL_FLAG(bool, step_in_backward, false,
          "Step each unit's optimizer as soon as its gradients are reduced.");
ABSL_FLAG(int, backwards, 1,
          "Backwards of a step; all but the last accumulate whole gradients.");
ABSL_FLAG(double, optimizer_state, 2,
          "Bytes of optimizer state per byte of parameters: 2 for Adam.");
ABSL_FLAG(std::string, stored, "fp32",
          "Dtype of parameters at rest: fp64, fp32, bf16, fp16 or fp8.");
ABSL_FLAG(std::string, computed, "bf16", "Dtype of parameters while gathered.");
ABSL_FLAG(std::string, reduced, "fp32", "Dtype of gradients while reduced.");

ABSL_FLAG(double, tflops, 400,
          "10^12 floating-point operations per second that a rank reaches.");
ABSL_FLAG(double, memory_gbps, 2500,
          "10^9 bytes per second that a rank reads and writes, together.");
ABSL_FLAG(int, ranks_per_host, 8, "Ranks of a host; 0: all.");
ABSL_FLAG(absl::Duration, host_latency, absl::Microseconds(3),
          "Time of an empty message between ranks of a host.");
ABSL_FLAG(double, host_gbps, 450,
          "10^9 bytes per second that a rank exchanges on its host, each way.");
ABSL_FLAG(absl::Duration, latency, absl::Microseconds(12),
          "Time of an empty message between hosts.");
ABSL_FLAG(double, gbps, 400,
          "10^9 bytes per second that all ranks of a host together exchange "
          "with other hosts, each way.");

namespace fsdp::simulator {
namespace {

constexpr char kUsage[] =
    "predicts what a training step costs on each of several numbers of ranks: "
    "its time, how much of it is spent waiting for communication, the bytes "
    "every rank sends and the memory it needs.\n"
    "The library's own schedule runs against a clock; what compute, memory and "
    "network cost is said by flags. The defaults are a GPT with 6.7 billion "
    "parameters on hosts of 8 accelerators.\n\n"
    "  simulate --ranks=8,1024 --shard_ranks=8\n"
    "  simulate --layers=12 --dim=768 --ranks=4 --ranks_per_host=1 --gbps=1.2";

constexpr int kMostRanks = 16384;
constexpr double kGiga = 1e9;

const std::map<std::string, int> kElementBytes = {
    {"fp64", 8}, {"fp32", 4}, {"bf16", 2}, {"fp16", 2}, {"fp8", 1}};

absl::StatusOr<std::vector<int>> ParseRanks(const std::string& text) {
  std::vector<int> ranks;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    int number;
    if (!absl::SimpleAtoi(part, &number) || number < 1 || number > kMostRanks) {
      return InvalidFlag(FLAGS_ranks, text,
                         absl::StrCat("expected numbers from 1 to ", kMostRanks,
                                      " like 8,64"));
    }
    ranks.push_back(number);
  }
  return ranks;
}

absl::StatusOr<Settings> ReadFlags() {
  Settings settings;
  settings.gpt = {absl::GetFlag(FLAGS_layers), absl::GetFlag(FLAGS_dim),
                  absl::GetFlag(FLAGS_vocab),  absl::GetFlag(FLAGS_seq),
                  absl::GetFlag(FLAGS_batch),  absl::GetFlag(FLAGS_recompute)};
  FSDP_ASSIGN_OR_RETURN(settings.ranks, ParseRanks(absl::GetFlag(FLAGS_ranks)));

  ShardingOptions& sharding = settings.scenario.sharding;
  sharding.shard_ranks = absl::GetFlag(FLAGS_shard_ranks);
  sharding.reshard_root = absl::GetFlag(FLAGS_reshard_root);
  sharding.backward_group_size = absl::GetFlag(FLAGS_backward_group);
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_sharding,
                                {{"full", Strategy::kFull},
                                 {"gradients", Strategy::kGradients},
                                 {"optimizer", Strategy::kOptimizer},
                                 {"replicated", Strategy::kReplicated}},
                                sharding.strategy));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_stored, kElementBytes, sharding.stored_bytes));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_computed, kElementBytes, sharding.compute_bytes));
  FSDP_RETURN_IF_ERROR(
      ReadFlag(FLAGS_reduced, kElementBytes, sharding.reduce_bytes));

  CostOptions& costs = settings.scenario.costs;
  costs.flops_per_second = absl::GetFlag(FLAGS_tflops) * 1e12;
  costs.memory_bandwidth = absl::GetFlag(FLAGS_memory_gbps) * kGiga;
  costs.ranks_per_host = absl::GetFlag(FLAGS_ranks_per_host);
  costs.host = {absl::ToDoubleSeconds(absl::GetFlag(FLAGS_host_latency)),
                absl::GetFlag(FLAGS_host_gbps) * kGiga};
  costs.network = {absl::ToDoubleSeconds(absl::GetFlag(FLAGS_latency)),
                   absl::GetFlag(FLAGS_gbps) * kGiga};

  StepOptions& step = settings.scenario.step;
  step.schedule.forward_prefetch = absl::GetFlag(FLAGS_forward_prefetch);
  step.schedule.backward_prefetch = absl::GetFlag(FLAGS_backward_prefetch);
  step.schedule.max_gathered_units = absl::GetFlag(FLAGS_max_gathered_units);
  step.schedule.max_reduce_buffers = absl::GetFlag(FLAGS_max_reduce_buffers);
  step.schedule.step_in_backward = absl::GetFlag(FLAGS_step_in_backward);
  step.memory.backwards_per_step = absl::GetFlag(FLAGS_backwards);
  step.memory.optimizer_state = absl::GetFlag(FLAGS_optimizer_state);
  return settings;
}

}  // namespace

absl::StatusOr<Settings> ParseFlags(int argc, char** argv) {
  FSDP_RETURN_IF_ERROR(
      fsdp::ParseFlags(argc, argv, kUsage, "planner/tool/command_line.cc"));
  return ReadFlags();
}

std::string StepTable(const std::vector<StepResult>& rows) {
  std::string text = absl::StrFormat(
      "time of a step, ms\n%8s %7s %10s %10s %10s %10s %10s %10s %9s\n",
      "ranks", "copies", "step", "compute", "copying", "optimizer",
      "exp.gather", "exp.reduce", "exposed");
  for (const StepResult& row : rows) {
    const Spent& total = row.total;
    absl::StrAppendFormat(&text, "%8d %7d", row.ranks, row.copies);
    for (const double seconds :
         {row.seconds, total.compute, total.copies, total.optimizer,
          total.exposed_gather, total.exposed_reduce}) {
      absl::StrAppendFormat(&text, " %10.3f", 1e3 * seconds);
    }
    absl::StrAppendFormat(
        &text, " %8.1f%%\n",
        row.seconds == 0 ? 0 : 100 * total.exposed() / row.seconds);
  }
  absl::StrAppendFormat(&text,
                        "\nof each rank: MB it sends, MiB it holds at most\n"
                        "%8s %10s %10s %10s %10s %10s %10s %10s %10s\n",
                        "ranks", "sent", "shards", "gradients", "optimizer",
                        "gathered", "parts", "reducing", "together");
  for (const StepResult& row : rows) {
    const MemoryPlan& peak = row.peak;
    absl::StrAppendFormat(&text, "%8d %10.1f", row.ranks,
                          static_cast<double>(row.total.bytes()) / 1e6);
    for (const int64_t bytes :
         {peak.shards, peak.gradients, peak.optimizer, peak.gathered,
          peak.parts, peak.in_flight, peak.total()}) {
      absl::StrAppendFormat(&text, " %10.1f",
                            static_cast<double>(bytes) / (1 << 20));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

}  // namespace fsdp::simulator
