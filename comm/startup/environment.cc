#include "comm/startup/environment.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr int kMaxPort = 65535;
constexpr char kLoopback[] = "127.0.0.1";
constexpr char kIncarnationName[] = "FSDP_REPLICA_INCARNATION";
constexpr char kKeeperName[] = "FSDP_REPLICA_STORE";

// Derived ports lie below the range that Linux hands out by itself (32768 on).
constexpr uint64_t kFirstDerivedPort = 15000;
constexpr uint64_t kDerivedPorts = 10000;

class Variables {
 public:
  explicit Variables(GetEnvironmentVariable get) : get_(get) {}

  std::optional<std::string> Find(const char* name) const {
    const char* value = get_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return std::string(value);
  }

  bool Has(const char* name) const { return Find(name).has_value(); }

  std::string Value(const char* name) const {
    return Find(name).value_or(std::string());
  }

  // Returns the first of `names` that is set, else the last one.
  const char* FirstSet(std::vector<const char*> names) const {
    for (const char* name : names) {
      if (Has(name)) return name;
    }
    return names.back();
  }

  static absl::Status NotSet(const char* name, absl::string_view source) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is not set, but other variables of ", source,
                     " are; set all of them or none"));
  }

  // Returns the integer in `name`, which must be set and in [min, max].
  absl::StatusOr<int> Integer(const char* name, int min, int max,
                              absl::string_view source) const {
    const std::optional<std::string> text = Find(name);
    if (!text.has_value()) return NotSet(name, source);
    int value = 0;
    if (!absl::SimpleAtoi(*text, &value) || value < min || value > max) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, "=", *text, ": expected an integer ",
          max == kMaxInt ? absl::StrCat("of at least ", min)
                         : absl::StrCat("from ", min, " to ", max)));
    }
    return value;
  }

 private:
  const GetEnvironmentVariable get_;
};

absl::Status ReadRank(const Variables& variables, const char* rank_name,
                      const char* size_name, absl::string_view source,
                      int* rank, int* size) {
  FSDP_ASSIGN_OR_RETURN(*rank,
                        variables.Integer(rank_name, 0, kMaxInt, source));
  FSDP_ASSIGN_OR_RETURN(*size,
                        variables.Integer(size_name, 1, kMaxInt, source));
  if (*rank >= *size) {
    return absl::InvalidArgumentError(absl::StrCat(
        rank_name, "=", *rank, ": expected less than ", size_name, "=", *size));
  }
  return absl::OkStatus();
}

// Reads MASTER_ADDR and MASTER_PORT over what the caller has filled in; only a
// job of one rank may do without both.
absl::Status ReadMaster(const Variables& variables, Environment* environment) {
  const absl::string_view source = Name(environment->started_by);
  if (variables.Has("MASTER_ADDR")) {
    environment->master_addr = variables.Value("MASTER_ADDR");
  }
  if (variables.Has("MASTER_PORT")) {
    FSDP_ASSIGN_OR_RETURN(
        environment->master_port,
        variables.Integer("MASTER_PORT", 1, kMaxPort, source));
  }
  const bool has_address = !environment->master_addr.empty();
  const bool has_port = environment->master_port != 0;
  if (has_address && has_port) return absl::OkStatus();
  if (!has_address && !has_port && environment->world_size == 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      has_address ? "MASTER_PORT" : "MASTER_ADDR", " is not set: ", source,
      " started ", environment->world_size,
      " rank(s), which need the address and the port of rank 0's host, as in "
      "MASTER_ADDR=node1 MASTER_PORT=29500"));
}

absl::Status CheckLocalSize(const Environment& environment,
                            absl::string_view local_name) {
  if (environment.local_world_size <= environment.world_size) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      local_name, "=", environment.local_world_size,
      ": expected at most the size of the job, ", environment.world_size));
}

absl::Status ReadRestarts(const Variables& variables,
                          Environment* environment) {
  const absl::string_view source = Name(environment->started_by);
  for (const auto& [name, value] :
       {std::make_pair("TORCHELASTIC_RESTART_COUNT",
                       &environment->restart_count),
        std::make_pair("TORCHELASTIC_MAX_RESTARTS",
                       &environment->max_restarts)}) {
    if (!variables.Has(name)) continue;
    FSDP_ASSIGN_OR_RETURN(*value, variables.Integer(name, 0, kMaxInt, source));
  }
  return absl::OkStatus();
}

absl::Status ReadTorchrun(const Variables& variables,
                          Environment* environment) {
  const bool launched = variables.Has("FSDP_LAUNCHER");
  environment->started_by =
      launched ? StartedBy::kRanksFlag : StartedBy::kTorchrun;
  const absl::string_view source = Name(environment->started_by);
  FSDP_RETURN_IF_ERROR(ReadRank(variables, "RANK", "WORLD_SIZE", source,
                                &environment->rank, &environment->world_size));
  if (variables.Has("LOCAL_RANK") || variables.Has("LOCAL_WORLD_SIZE")) {
    FSDP_RETURN_IF_ERROR(ReadRank(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                  source, &environment->local_rank,
                                  &environment->local_world_size));
    FSDP_RETURN_IF_ERROR(CheckLocalSize(*environment, "LOCAL_WORLD_SIZE"));
  }
  FSDP_RETURN_IF_ERROR(ReadMaster(variables, environment));
  if (launched && variables.Has("FSDP_LAUNCHER_LISTEN_FD")) {
    FSDP_ASSIGN_OR_RETURN(
        environment->listen_fd,
        variables.Integer("FSDP_LAUNCHER_LISTEN_FD", 0, kMaxInt, source));
  }
  FSDP_RETURN_IF_ERROR(ReadRestarts(variables, environment));
  // Keys of an earlier attempt may stay in the agent's store. torchrun numbers
  // the attempts, but not where hosts have come or gone.
  if (!launched && variables.Value("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    environment->agent_store = true;
    environment->agent_store_prefix =
        absl::StrCat("/worker/attempt_", environment->restart_count, "_of_",
                     environment->world_size, "_ranks");
  }
  return absl::OkStatus();
}

// Returns the same port on every rank of a job that has this name.
int PortFromName(absl::string_view name) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  }
  return static_cast<int>(kFirstDerivedPort + hash % kDerivedPorts);
}

absl::Status ReadOpenMpi(const Variables& variables, Environment* environment) {
  environment->started_by = StartedBy::kOpenMpi;
  const absl::string_view source = Name(environment->started_by);
  FSDP_RETURN_IF_ERROR(ReadRank(variables, "OMPI_COMM_WORLD_RANK",
                                "OMPI_COMM_WORLD_SIZE", source,
                                &environment->rank, &environment->world_size));
  FSDP_RETURN_IF_ERROR(ReadRank(
      variables, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
      source, &environment->local_rank, &environment->local_world_size));
  FSDP_RETURN_IF_ERROR(
      CheckLocalSize(*environment, "OMPI_COMM_WORLD_LOCAL_SIZE"));
  const bool one_host =
      environment->local_world_size == environment->world_size;
  const bool named =
      variables.Has("MASTER_ADDR") || variables.Has("MASTER_PORT");
  if (one_host && !named && environment->world_size > 1) {
    environment->master_addr = kLoopback;
    environment->master_port = PortFromName(variables.Value(
        variables.FirstSet({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})));
  }
  return ReadMaster(variables, environment);
}

// Returns how many ranks host number `node` has in a list such as "2(x3),1".
std::optional<int> TasksOnNode(absl::string_view list, int node) {
  for (absl::string_view entry : absl::StrSplit(list, ',')) {
    const std::vector<absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits("(x", 1));
    int tasks = 0;
    int hosts = 1;
    if (!absl::SimpleAtoi(parts[0], &tasks) || tasks < 1) return std::nullopt;
    if (parts.size() == 2) {
      absl::string_view repeat = parts[1];
      if (!absl::EndsWith(repeat, ")")) return std::nullopt;
      repeat.remove_suffix(1);
      if (!absl::SimpleAtoi(repeat, &hosts) || hosts < 1) return std::nullopt;
    }
    if (node < hosts) return tasks;
    node -= hosts;
  }
  return std::nullopt;
}

absl::Status ReadSlurmLocalSize(const Variables& variables,
                                Environment* environment) {
  const absl::string_view source = Name(environment->started_by);
  const char* list_name =
      variables.FirstSet({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (variables.Has(list_name)) {
    int node = 0;
    if (variables.Has("SLURM_NODEID")) {
      FSDP_ASSIGN_OR_RETURN(
          node, variables.Integer("SLURM_NODEID", 0, kMaxInt, source));
    }
    const std::optional<int> tasks =
        TasksOnNode(variables.Value(list_name), node);
    if (!tasks.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(list_name, "=", variables.Value(list_name),
                       ": expected the ranks of each host, host ", node,
                       " included, as in 2(x3),1"));
    }
    environment->local_world_size = *tasks;
    return absl::OkStatus();
  }
  FSDP_ASSIGN_OR_RETURN(
      const int tasks,
      variables.Integer("SLURM_NTASKS_PER_NODE", 1, kMaxInt, source));
  // Next to --ntasks this is an upper bound.
  environment->local_world_size = std::min(tasks, environment->world_size);
  return absl::OkStatus();
}

absl::Status ReadSlurmMaster(const Variables& variables,
                             Environment* environment) {
  if (environment->world_size == 1 && !variables.Has("MASTER_ADDR")) {
    return absl::OkStatus();
  }
  if (!variables.Has("MASTER_ADDR")) {
    const char* name = variables.FirstSet(
        {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
    absl::StatusOr<std::string> host = FirstSlurmHost(variables.Value(name));
    if (!host.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, "=", host.status().message(), "; or set MASTER_ADDR"));
    }
    environment->master_addr = *std::move(host);
  }
  if (!variables.Has("MASTER_PORT")) {
    FSDP_ASSIGN_OR_RETURN(
        const int job, variables.Integer("SLURM_JOB_ID", 0, kMaxInt, "Slurm"));
    int step = 0;
    // Steps of one job may run at the same time on the same hosts. The number
    // of an interactive step does not fit an int and stands for no number.
    if (!absl::SimpleAtoi(variables.Value("SLURM_STEP_ID"), &step)) step = 0;
    const uint64_t number =
        static_cast<uint64_t>(job) + 131 * static_cast<uint64_t>(step);
    environment->master_port =
        static_cast<int>(kFirstDerivedPort + number % kDerivedPorts);
  }
  return ReadMaster(variables, environment);
}

absl::Status ReadSlurm(const Variables& variables, Environment* environment) {
  environment->started_by = StartedBy::kSlurm;
  const absl::string_view source = Name(environment->started_by);
  // In an interactive step SLURM_NTASKS is the allocation's: the step's own
  // number comes first.
  const char* size_name =
      variables.FirstSet({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  FSDP_RETURN_IF_ERROR(ReadRank(variables, "SLURM_PROCID", size_name, source,
                                &environment->rank, &environment->world_size));
  if (variables.Has("WORLD_SIZE")) {
    FSDP_ASSIGN_OR_RETURN(const int world_size,
                          variables.Integer("WORLD_SIZE", 1, kMaxInt, source));
    if (world_size != environment->world_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "WORLD_SIZE=", world_size, ": expected what Slurm says, ", size_name,
          "=", environment->world_size, "; unset WORLD_SIZE"));
    }
  }
  FSDP_ASSIGN_OR_RETURN(environment->local_rank,
                        variables.Integer("SLURM_LOCALID", 0, kMaxInt, source));
  if (environment->world_size > 1) {
    FSDP_RETURN_IF_ERROR(ReadSlurmLocalSize(variables, environment));
  }
  if (environment->local_rank >= environment->local_world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("SLURM_LOCALID=", environment->local_rank,
                     ": expected less than the ranks of this host, ",
                     environment->local_world_size));
  }
  FSDP_RETURN_IF_ERROR(
      CheckLocalSize(*environment, "SLURM_STEP_TASKS_PER_NODE"));
  return ReadSlurmMaster(variables, environment);
}

// Reads "host:29500" or "[::1]:29500".
absl::Status ReadKeeper(const Variables& variables, Environment* environment) {
  const std::string text = variables.Value(kKeeperName);
  const size_t colon = text.rfind(':');
  if (colon != std::string::npos) {
    absl::string_view host = absl::string_view(text).substr(0, colon);
    const bool has_brackets =
        absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
    const bool is_port =
        absl::SimpleAtoi(text.substr(colon + 1), &environment->keeper_port) &&
        environment->keeper_port >= 1 && environment->keeper_port <= kMaxPort;
    const bool is_host = !host.empty() &&
                         host.find_first_of("[]") == host.npos &&
                         (has_brackets || !absl::StrContains(host, ':'));
    environment->keeper_addr = std::string(host);
    if (is_host && is_port) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      kKeeperName, "=", text,
      ": expected the host of the replicas' keeper and its port, from 1 to ",
      kMaxPort, ", as in node1:29400 or [::1]:29400"));
}

// Requires that the restarts have been read.
absl::Status ReadReplica(const Variables& variables, Environment* environment) {
  const char* const kNames[] = {"FSDP_REPLICA", "FSDP_REPLICAS",
                                kIncarnationName, kKeeperName};
  const bool any = std::any_of(
      std::begin(kNames), std::end(kNames),
      [&variables](const char* name) { return variables.Has(name); });
  if (!any) return absl::OkStatus();
  const absl::string_view source = "replicas";
  FSDP_RETURN_IF_ERROR(ReadRank(variables, "FSDP_REPLICA", "FSDP_REPLICAS",
                                source, &environment->replica,
                                &environment->replicas));
  const bool numbers_attempts = environment->started_by == StartedBy::kTorchrun;
  const int attempts = numbers_attempts ? environment->restart_count : 0;
  FSDP_ASSIGN_OR_RETURN(
      const int first,
      variables.Integer(kIncarnationName, 1, kMaxInt - attempts, source));
  environment->replica_incarnation = first + attempts;
  if (!variables.Has(kKeeperName)) return variables.NotSet(kKeeperName, source);
  return ReadKeeper(variables, environment);
}

// A variable that only a launcher sets, without the rank that belongs to it,
// hides a broken start: a lone process would train as if it were the whole job.
absl::Status CheckNothingSet(const Variables& variables) {
  const struct {
    const char* variable;
    const char* rank;
  } kSigns[] = {
      {"WORLD_SIZE", "RANK"},
      {"LOCAL_RANK", "RANK"},
      {"LOCAL_WORLD_SIZE", "RANK"},
      {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"},
      {"SLURM_LOCALID", "SLURM_PROCID"},
  };
  for (const auto& sign : kSigns) {
    if (!variables.Has(sign.variable)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(sign.rank, " is not set, but ", sign.variable, "=",
                     variables.Value(sign.variable), " is; set both or none"));
  }
  // This is the shell of an allocation: each of several tasks that srun has not
  // started would take itself for the only rank.
  const std::string tasks = variables.Value("SLURM_NTASKS");
  if (tasks.empty() || tasks == "1") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "SLURM_PROCID is not set, but SLURM_NTASKS=", tasks,
      " is: start the ranks by srun, or, to start them on this host alone, "
      "this program by env -u SLURM_NTASKS"));
}

}  // namespace

absl::string_view Name(StartedBy started_by) {
  switch (started_by) {
    case StartedBy::kNobody:
      return "a single process";
    case StartedBy::kTorchrun:
      return "torchrun";
    case StartedBy::kRanksFlag:
      return "--ranks";
    case StartedBy::kOpenMpi:
      return "Open MPI";
    case StartedBy::kSlurm:
      return "Slurm";
  }
  return "an unknown launcher";
}

absl::StatusOr<std::string> FirstSlurmHost(const std::string& node_list) {
  std::string host;
  // 0 outside brackets, 1 in the first name of a bracket, 2 in the rest of it.
  int bracket = 0;
  size_t name_begin = 0;
  bool well_formed = true;
  for (const char c : node_list) {
    if (c == ',' && bracket == 0) break;
    if (c == '[') {
      well_formed = well_formed && bracket == 0;
      bracket = 1;
      name_begin = host.size();
    } else if (c == ']') {
      well_formed = well_formed && bracket != 0 && host.size() > name_begin;
      bracket = 0;
    } else if (bracket == 1 && (c == ',' || c == '-')) {
      bracket = 2;
    } else if (bracket != 2) {
      host.push_back(c);
    }
  }
  if (!well_formed || bracket != 0 || host.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        node_list, ": expected a list of hosts such as node[003-010,12]"));
  }
  return host;
}

absl::StatusOr<Environment> ReadEnvironment(GetEnvironmentVariable get) {
  const Variables variables(get);
  Environment environment;
  environment.interface = variables.Value("GLOO_SOCKET_IFNAME");
  environment.secret = variables.Value("FSDP_JOB_SECRET");
  environment.inspection_folder = variables.Value("FSDP_INSPECT_DIR");
  // torchrun may run inside a Slurm step, and mpirun starts its own daemons by
  // srun: the innermost launcher counts.
  if (variables.Has("RANK")) {
    FSDP_RETURN_IF_ERROR(ReadTorchrun(variables, &environment));
  } else if (variables.Has("OMPI_COMM_WORLD_RANK")) {
    FSDP_RETURN_IF_ERROR(ReadOpenMpi(variables, &environment));
  } else if (variables.Has("SLURM_PROCID")) {
    FSDP_RETURN_IF_ERROR(ReadSlurm(variables, &environment));
  } else {
    FSDP_RETURN_IF_ERROR(CheckNothingSet(variables));
  }
  FSDP_RETURN_IF_ERROR(ReadReplica(variables, &environment));
  return environment;
}

}  // namespace fsdp::comm
