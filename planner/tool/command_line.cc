#include "planner/tool/command_line.h"

#include <cstdint>
#include <map>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/command_line.h"
#include "base/output_file.h"
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
ABSL_FLAG(
    double, host_memory_gbps, 0,
    "10^9 bytes per second that all ranks of a host read and write; 0: no "
    "limit.");
ABSL_FLAG(double, optimizer_gbps, 0,
          "10^9 bytes per second that a rank's optimizer reads and writes; 0: "
          "--memory_gbps.");
ABSL_FLAG(double, cores, 0,
          "Cores of a host, which its ranks share; 0: a device per rank.");
ABSL_FLAG(double, threads, 1, "Cores that a rank computes on.");
ABSL_FLAG(
    std::string, network, "8:3us:450,any:12us:400",
    "Levels of the network, the lowest first, as MEMBERS:LATENCY:GB/s. "
    "Members of the first are the ranks of a host, those of the next "
    "hosts, and so on; those of the last may be \"any\" number. The "
    "bandwidth is a member's, each way; a host's is shared by its ranks. "
    "A fourth number is the bandwidth of reductions. \"inf\" is allowed.");
ABSL_FLAG(std::string, algorithm, "hierarchical",
          "How collectives pass pieces on. ring: one ring of all ranks. "
          "hierarchical: a ring on each level, one after the other. recursive: "
          "the same with the latency of recursive doubling.");
ABSL_FLAG(bool, overlap, true,
          "Collectives run beside compute, not in its thread.");
ABSL_FLAG(bool, shared_memory, false,
          "Ranks of a host read each other's memory: among them an all-gather "
          "costs a fence, and one gathered copy serves the host.");
ABSL_FLAG(absl::Duration, fence, absl::Microseconds(2),
          "Time of a fence in shared memory.");

ABSL_FLAG(bool, per_unit, false,
          "Print a line per unit for the last number of ranks.");
ABSL_FLAG(std::string, csv, "", "Write the numbers to this file.");

namespace fsdp::simulator {
namespace {

constexpr char kUsage[] =
    "predicts what a training step costs on each of several numbers of ranks: "
    "its time, how much of it is spent waiting for communication, the bytes "
    "every rank sends and the memory it needs.\n"
    "The library's own schedule runs against a clock; what compute, memory and "
    "network cost is said by flags. The defaults are a GPT with 6.7 billion "
    "parameters on hosts of 8 accelerators.\n\n"
    "  simulate --ranks=8,1024 --shard_ranks=8 --csv=steps.csv\n"
    "  simulate --layers=12 --dim=768 --ranks=4 --network=any:50us:1.2 "
    "--computed=fp32 --cores=2";

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

absl::StatusOr<NetworkLevel> ParseLevel(absl::string_view text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  const auto invalid = [&](absl::string_view what) {
    return InvalidFlag(FLAGS_network, text,
                       absl::StrCat("expected ", what,
                                    " in MEMBERS:LATENCY:GB/s[:GB/s of "
                                    "reductions], like 8:3us:450"));
  };
  if (parts.size() != 3 && parts.size() != 4) return invalid("three numbers");
  NetworkLevel level;
  if (parts[0] != "any" &&
      (!absl::SimpleAtoi(parts[0], &level.members) || level.members < 1)) {
    return invalid("a positive number or \"any\" as members");
  }
  absl::Duration latency;
  if (!absl::ParseDuration(parts[1], &latency) ||
      latency < absl::ZeroDuration()) {
    return invalid("a time with its unit as the latency");
  }
  level.latency = absl::ToDoubleSeconds(latency);
  double* const bandwidths[] = {&level.bandwidth, &level.reduce_bandwidth};
  for (size_t i = 2; i < parts.size(); ++i) {
    double* const bandwidth = bandwidths[i - 2];
    if (!absl::SimpleAtod(parts[i], bandwidth) || !(*bandwidth > 0)) {
      return invalid("a positive bandwidth");
    }
    *bandwidth *= kGiga;
  }
  return level;
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
  costs.host_memory_bandwidth = absl::GetFlag(FLAGS_host_memory_gbps) * kGiga;
  costs.optimizer_bandwidth = absl::GetFlag(FLAGS_optimizer_gbps) * kGiga;
  costs.cores = absl::GetFlag(FLAGS_cores);
  costs.threads = absl::GetFlag(FLAGS_threads);
  costs.overlap = absl::GetFlag(FLAGS_overlap);
  costs.shared_memory = absl::GetFlag(FLAGS_shared_memory);
  costs.fence_seconds = absl::ToDoubleSeconds(absl::GetFlag(FLAGS_fence));
  FSDP_ASSIGN_OR_RETURN(costs.levels,
                        ParseNetwork(absl::GetFlag(FLAGS_network)));
  FSDP_RETURN_IF_ERROR(ReadFlag(FLAGS_algorithm,
                                {{"ring", Algorithm::kRing},
                                 {"hierarchical", Algorithm::kHierarchical},
                                 {"recursive", Algorithm::kRecursive}},
                                costs.algorithm));

  StepOptions& step = settings.scenario.step;
  step.schedule.forward_prefetch = absl::GetFlag(FLAGS_forward_prefetch);
  step.schedule.backward_prefetch = absl::GetFlag(FLAGS_backward_prefetch);
  step.schedule.max_gathered_units = absl::GetFlag(FLAGS_max_gathered_units);
  step.schedule.max_reduce_buffers = absl::GetFlag(FLAGS_max_reduce_buffers);
  step.schedule.step_in_backward = absl::GetFlag(FLAGS_step_in_backward);
  step.memory.backwards_per_step = absl::GetFlag(FLAGS_backwards);
  step.memory.optimizer_state = absl::GetFlag(FLAGS_optimizer_state);

  settings.per_unit = absl::GetFlag(FLAGS_per_unit);
  settings.csv = ResolvePath(absl::GetFlag(FLAGS_csv));
  return settings;
}

}  // namespace

absl::StatusOr<std::vector<NetworkLevel>> ParseNetwork(absl::string_view text) {
  std::vector<NetworkLevel> levels;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    if (!levels.empty() && levels.back().members == 0) {
      return InvalidFlag(FLAGS_network, text,
                         "expected \"any\" members on the last level only");
    }
    FSDP_ASSIGN_OR_RETURN(levels.emplace_back(), ParseLevel(part));
  }
  return levels;
}

absl::StatusOr<Settings> ParseFlags(int argc, char** argv) {
  const std::vector<char*> left =
      ParseCommandLine(argc, argv, kUsage, "planner/tool/command_line.cc");
  if (left.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "unexpected argument \"", left[1], "\": see --help for the flags"));
  }
  return ReadFlags();
}

namespace {

constexpr double kMilli = 1e-3;

double Percent(double part, double whole) {
  return whole == 0 ? 0 : 100 * part / whole;
}

double Megabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e6; }

double Mebibytes(int64_t bytes) {
  return static_cast<double>(bytes) / (1 << 20);
}

}  // namespace

std::string StepTable(const std::vector<StepResult>& rows) {
  std::string text = absl::StrFormat(
      "time of a step, ms\n%8s %7s %10s %10s %10s %10s %10s %10s %9s\n",
      "ranks", "copies", "step", "compute", "copying", "optimizer",
      "exp.gather", "exp.reduce", "exposed");
  for (const StepResult& row : rows) {
    const Spent& total = row.total;
    absl::StrAppendFormat(
        &text, "%8d %7d %10.3f %10.3f %10.3f %10.3f %10.3f %10.3f %8.1f%%\n",
        row.ranks, row.copies, row.seconds / kMilli, total.compute / kMilli,
        total.copies / kMilli, total.optimizer / kMilli,
        total.exposed_gather / kMilli, total.exposed_reduce / kMilli,
        Percent(total.exposed(), row.seconds));
  }
  absl::StrAppendFormat(&text,
                        "\nof each rank: MB it sends, MiB it holds at most\n"
                        "%8s %10s %10s %10s %10s %10s %10s %10s %10s\n",
                        "ranks", "sent", "shards", "gradients", "optimizer",
                        "gathered", "parts", "reducing", "together");
  for (const StepResult& row : rows) {
    const MemoryPlan& peak = row.peak;
    absl::StrAppendFormat(
        &text, "%8d %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f %10.1f\n",
        row.ranks, Megabytes(row.total.bytes()), Mebibytes(peak.shards),
        Mebibytes(peak.gradients), Mebibytes(peak.optimizer),
        Mebibytes(peak.gathered), Mebibytes(peak.parts),
        Mebibytes(peak.in_flight), Mebibytes(peak.total()));
  }
  return text;
}

std::string UnitTable(const ModelShape& model, const StepResult& step) {
  std::string text =
      absl::StrFormat("%-24s %10s %10s %10s %10s %10s %10s %10s\n",
                      "unit: ms, MB sent", "compute", "copying", "gathering",
                      "exposed", "reducing", "exposed", "sent");
  const auto add = [&text](absl::string_view name, const Spent& spent) {
    absl::StrAppendFormat(
        &text, "%-24s %10.3f %10.3f %10.3f %10.3f %10.3f %10.3f %10.1f\n", name,
        spent.compute / kMilli, spent.copies / kMilli, spent.gather / kMilli,
        spent.exposed_gather / kMilli, spent.reduce / kMilli,
        spent.exposed_reduce / kMilli, Megabytes(spent.bytes()));
  };
  for (size_t i = 0; i < step.units.size(); ++i) {
    add(model.units[i].name, step.units[i]);
  }
  add("all", step.total);
  return text;
}

std::string StepCsv(const std::vector<StepResult>& rows) {
  std::string text =
      "ranks,copies,step_seconds,compute_seconds,copying_seconds,"
      "optimizer_seconds,gather_seconds,reduce_seconds,exposed_gather_seconds,"
      "exposed_reduce_seconds,gathered_bytes,reduced_bytes,replicated_bytes,"
      "shards,gradients,optimizer,gathered,parts,reduce_buffers,memory\n";
  for (const StepResult& row : rows) {
    const Spent& total = row.total;
    const MemoryPlan& peak = row.peak;
    absl::StrAppendFormat(
        &text, "%d,%d,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,", row.ranks,
        row.copies, row.seconds, total.compute, total.copies, total.optimizer,
        total.gather, total.reduce, total.exposed_gather, total.exposed_reduce);
    absl::StrAppendFormat(&text, "%d,%d,%d,%d,%d,%d,%d,%d,%d,%d\n",
                          total.gathered_bytes, total.reduced_bytes,
                          total.replicated_bytes, peak.shards, peak.gradients,
                          peak.optimizer, peak.gathered, peak.parts,
                          peak.in_flight, peak.total());
  }
  return text;
}

}  // namespace fsdp::simulator
