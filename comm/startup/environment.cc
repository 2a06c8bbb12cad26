#include "comm/startup/environment.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/control_groups.h"
#include "base/fnv1a.h"
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

// Returns the same port on every rank of a job that has this name.
int PortFromName(absl::string_view name) {
  return static_cast<int>(kFirstDerivedPort + Fnv1a(name) % kDerivedPorts);
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

// Reads the variables of one process.
class Reader {
 public:
  explicit Reader(GetEnvironmentVariable get) : get_(get) {}

  absl::StatusOr<Environment> Read() {
    result_.interface = Value("GLOO_SOCKET_IFNAME");
    result_.secret = Value("FSDP_JOB_SECRET");
    result_.inspection_folder = Value("FSDP_INSPECT_DIR");
    // torchrun may run inside a Slurm step, and mpirun starts its own daemons
    // by srun: the innermost launcher counts. srun may set PMI_RANK, too, but
    // not MPI_LOCALRANKID.
    const bool by_srun = IsSrunsTask() && !Has("MPI_LOCALRANKID");
    if (Has("RANK")) {
      FSDP_RETURN_IF_ERROR(ReadTorchrun());
    } else if (Has("OMPI_COMM_WORLD_RANK")) {
      FSDP_RETURN_IF_ERROR(ReadOpenMpi());
    } else if (Has("PMI_RANK") && !by_srun) {
      FSDP_RETURN_IF_ERROR(ReadMpi(StartedBy::kMpi, "PMI_RANK", "PMI_SIZE",
                                   "MPI_LOCALRANKID", "MPI_LOCALNRANKS"));
      FSDP_RETURN_IF_ERROR(ReadMaster());
    } else if (IsSrunsTask()) {
      FSDP_RETURN_IF_ERROR(ReadSlurm());
    } else {
      FSDP_RETURN_IF_ERROR(CheckNothingSet());
    }
    FSDP_RETURN_IF_ERROR(ReadReplica());
    return result_;
  }

 private:
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

  // Returns false in the shell of a job, too, which has a SLURM_PROCID: a batch
  // script is in no step, and what salloc opens in one of the special steps,
  // whose numbers are the last below 2^32.
  bool IsSrunsTask() const {
    constexpr uint32_t kFirstSpecial = 0xfffffff0;
    const std::string step = Value(FirstSet({"SLURM_STEP_ID", "SLURM_STEPID"}));
    uint32_t number = 0;
    return Has("SLURM_PROCID") && !step.empty() &&
           !(absl::SimpleAtoi(step, &number) && number >= kFirstSpecial);
  }

  absl::Status NotSet(const char* name) const {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is not set, but other variables of ", source_,
                     " are; set all of them or none"));
  }

  // Reads the integer in `name`, which must be set and in [min, max].
  absl::Status ReadInteger(const char* name, int min, int* value,
                           int max = kMaxInt) const {
    const std::optional<std::string> text = Find(name);
    if (!text.has_value()) return NotSet(name);
    if (absl::SimpleAtoi(*text, value) && *value >= min && *value <= max) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat(name, "=", *text, ": expected an integer ",
                     max == kMaxInt ? absl::StrCat("of at least ", min)
                                    : absl::StrCat("from ", min, " to ", max)));
  }

  absl::Status ReadIfSet(const char* name, int min, int* value,
                         int max = kMaxInt) const {
    return Has(name) ? ReadInteger(name, min, value, max) : absl::OkStatus();
  }

  absl::Status ReadRank(const char* rank_name, const char* size_name, int* rank,
                        int* size) const {
    FSDP_RETURN_IF_ERROR(ReadInteger(rank_name, 0, rank));
    FSDP_RETURN_IF_ERROR(ReadInteger(size_name, 1, size));
    if (*rank < *size) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        rank_name, "=", *rank, ": expected less than ", size_name, "=", *size));
  }

  void SetLauncher(StartedBy launcher) {
    result_.started_by = launcher;
    source_ = Name(launcher);
  }

  // Reads MASTER_ADDR and MASTER_PORT over what the caller has filled in; only
  // a job of one rank may do without both.
  absl::Status ReadMaster() {
    if (Has("MASTER_ADDR")) result_.master_addr = Value("MASTER_ADDR");
    FSDP_RETURN_IF_ERROR(
        ReadIfSet("MASTER_PORT", 1, &result_.master_port, kMaxPort));
    const bool has_address = !result_.master_addr.empty();
    const bool has_port = result_.master_port != 0;
    if (has_address && has_port) return absl::OkStatus();
    if (!has_address && !has_port && result_.world_size == 1) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        has_address ? "MASTER_PORT" : "MASTER_ADDR", " is not set: ", source_,
        " started ", result_.world_size,
        " rank(s), which need the address and the port of rank 0's host, as in "
        "MASTER_ADDR=node1 MASTER_PORT=29500"));
  }

  absl::Status CheckLocalSize(absl::string_view local_name) const {
    if (result_.local_world_size <= result_.world_size) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        local_name, "=", result_.local_world_size,
        ": expected at most the size of the job, ", result_.world_size));
  }

  absl::Status ReadTorchrun() {
    const bool launched = Has("FSDP_LAUNCHER");
    SetLauncher(launched ? StartedBy::kRanksFlag : StartedBy::kTorchrun);
    FSDP_RETURN_IF_ERROR(
        ReadRank("RANK", "WORLD_SIZE", &result_.rank, &result_.world_size));
    if (Has("LOCAL_RANK") || Has("LOCAL_WORLD_SIZE")) {
      FSDP_RETURN_IF_ERROR(ReadRank("LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                    &result_.local_rank,
                                    &result_.local_world_size));
      FSDP_RETURN_IF_ERROR(CheckLocalSize("LOCAL_WORLD_SIZE"));
    }
    FSDP_RETURN_IF_ERROR(ReadMaster());
    if (launched) {
      FSDP_RETURN_IF_ERROR(
          ReadIfSet("FSDP_LAUNCHER_LISTEN_FD", 0, &result_.listen_fd));
    }
    FSDP_RETURN_IF_ERROR(
        ReadIfSet("TORCHELASTIC_RESTART_COUNT", 0, &result_.restart_count));
    FSDP_RETURN_IF_ERROR(
        ReadIfSet("TORCHELASTIC_MAX_RESTARTS", 0, &result_.max_restarts));
    // Keys of an earlier attempt may stay in the agent's store. torchrun
    // numbers the attempts, but not where hosts have come or gone.
    if (!launched && Value("TORCHELASTIC_USE_AGENT_STORE") == "True") {
      result_.agent_store = true;
      result_.agent_store_prefix =
          absl::StrCat("/worker/attempt_", result_.restart_count, "_of_",
                       result_.world_size, "_ranks");
    }
    return absl::OkStatus();
  }

  // Reads the ranks from the variables with these names.
  absl::Status ReadMpi(StartedBy launcher, const char* rank, const char* size,
                       const char* local_rank, const char* local_size) {
    SetLauncher(launcher);
    FSDP_RETURN_IF_ERROR(
        ReadRank(rank, size, &result_.rank, &result_.world_size));
    FSDP_RETURN_IF_ERROR(ReadRank(local_rank, local_size, &result_.local_rank,
                                  &result_.local_world_size));
    return CheckLocalSize(local_size);
  }

  absl::Status ReadOpenMpi() {
    FSDP_RETURN_IF_ERROR(ReadMpi(
        StartedBy::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"));
    const bool one_host = result_.local_world_size == result_.world_size;
    const bool named = Has("MASTER_ADDR") || Has("MASTER_PORT");
    if (one_host && !named && result_.world_size > 1) {
      result_.master_addr = kLoopback;
      result_.master_port = PortFromName(
          Value(FirstSet({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})));
    }
    return ReadMaster();
  }

  absl::Status ReadSlurmLocalSize() {
    const char* list_name =
        FirstSet({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
    if (Has(list_name)) {
      int node = 0;
      FSDP_RETURN_IF_ERROR(ReadIfSet("SLURM_NODEID", 0, &node));
      const std::optional<int> tasks = TasksOnNode(Value(list_name), node);
      if (!tasks.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat(list_name, "=", Value(list_name),
                         ": expected the ranks of each host, host ", node,
                         " included, as in 2(x3),1"));
      }
      result_.local_world_size = *tasks;
      return absl::OkStatus();
    }
    int tasks = 0;
    FSDP_RETURN_IF_ERROR(ReadInteger("SLURM_NTASKS_PER_NODE", 1, &tasks));
    // Next to --ntasks this is an upper bound.
    result_.local_world_size = std::min(tasks, result_.world_size);
    return absl::OkStatus();
  }

  absl::Status ReadSlurmMaster() {
    if (result_.world_size == 1 && !Has("MASTER_ADDR")) {
      return absl::OkStatus();
    }
    if (!Has("MASTER_ADDR")) {
      const char* name = FirstSet(
          {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
      absl::StatusOr<std::string> host = FirstSlurmHost(Value(name));
      if (!host.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(
            name, "=", host.status().message(), "; or set MASTER_ADDR"));
      }
      result_.master_addr = *std::move(host);
    }
    if (!Has("MASTER_PORT")) {
      int job = 0;
      FSDP_RETURN_IF_ERROR(ReadInteger("SLURM_JOB_ID", 0, &job));
      int step = 0;
      // Steps of one job may run at the same time on the same hosts. The number
      // of an interactive step does not fit an int and stands for no number.
      if (!absl::SimpleAtoi(Value("SLURM_STEP_ID"), &step)) step = 0;
      const uint64_t number =
          static_cast<uint64_t>(job) + 131 * static_cast<uint64_t>(step);
      result_.master_port =
          static_cast<int>(kFirstDerivedPort + number % kDerivedPorts);
    }
    return ReadMaster();
  }

  absl::Status ReadSlurm() {
    SetLauncher(StartedBy::kSlurm);
    // SLURM_NTASKS may be the job's: the step's own number comes first.
    const char* size_name = FirstSet({"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
    FSDP_RETURN_IF_ERROR(ReadRank("SLURM_PROCID", size_name, &result_.rank,
                                  &result_.world_size));
    if (Has("WORLD_SIZE")) {
      int world_size = 0;
      FSDP_RETURN_IF_ERROR(ReadInteger("WORLD_SIZE", 1, &world_size));
      if (world_size != result_.world_size) {
        return absl::InvalidArgumentError(absl::StrCat(
            "WORLD_SIZE=", world_size, ": expected what Slurm says, ",
            size_name, "=", result_.world_size, "; unset WORLD_SIZE"));
      }
    }
    FSDP_RETURN_IF_ERROR(ReadInteger("SLURM_LOCALID", 0, &result_.local_rank));
    if (result_.world_size > 1) {
      FSDP_RETURN_IF_ERROR(ReadSlurmLocalSize());
    }
    if (result_.local_rank >= result_.local_world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("SLURM_LOCALID=", result_.local_rank,
                       ": expected less than the ranks of this host, ",
                       result_.local_world_size));
    }
    FSDP_RETURN_IF_ERROR(CheckLocalSize("SLURM_STEP_TASKS_PER_NODE"));
    return ReadSlurmMaster();
  }

  absl::Status ReadKeeper() {
    const std::string text = Value(kKeeperName);
    if (SplitPlace(text, &result_.keeper_addr, &result_.keeper_port)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        kKeeperName, "=", text,
        ": expected the host of the replicas' keeper and its port, from 1 to ",
        kMaxPort, ", as in node1:29400 or [::1]:29400"));
  }

  // Requires that the restarts have been read.
  absl::Status ReadReplica() {
    const char* const kNames[] = {"FSDP_REPLICA", "FSDP_REPLICAS",
                                  kIncarnationName, kKeeperName};
    const bool any =
        absl::c_any_of(kNames, [this](const char* name) { return Has(name); });
    if (!any) return absl::OkStatus();
    source_ = "replicas";
    FSDP_RETURN_IF_ERROR(ReadRank("FSDP_REPLICA", "FSDP_REPLICAS",
                                  &result_.replica, &result_.replicas));
    const bool numbers_attempts = result_.started_by == StartedBy::kTorchrun;
    const int attempts = numbers_attempts ? result_.restart_count : 0;
    FSDP_RETURN_IF_ERROR(ReadInteger(
        kIncarnationName, 1, &result_.replica_incarnation, kMaxInt - attempts));
    result_.replica_incarnation += attempts;
    if (!Has(kKeeperName)) return NotSet(kKeeperName);
    return ReadKeeper();
  }

  // A variable that only a launcher sets, without the rank that belongs to it,
  // hides a broken start: a lone process would train as if it were the whole
  // job.
  absl::Status CheckNothingSet() const {
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
        {"PMI_SIZE", "PMI_RANK"},
    };
    for (const auto& sign : kSigns) {
      if (!Has(sign.variable) || Has(sign.rank)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(sign.rank, " is not set, but ", sign.variable, "=",
                       Value(sign.variable), " is; set both or none"));
    }
    // This is the shell of a job: each of several tasks that srun has not
    // started would take itself for the only rank.
    const std::string tasks = Value("SLURM_NTASKS");
    if (tasks.empty() || tasks == "1") return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "SLURM_NTASKS=", tasks,
        ", and srun has not started this process: start the ranks by srun, or, "
        "to start them on this host alone, this program by env -u "
        "SLURM_NTASKS"));
  }

  const GetEnvironmentVariable get_;
  Environment result_;
  absl::string_view source_;  // the name of what sets the variables
};

}  // namespace

absl::string_view Name(StartedBy started_by) {
  static constexpr absl::string_view kNames[] = {
      "a single process", "torchrun", "--ranks", "Open MPI", "Slurm", "MPI"};
  static_assert(std::size(kNames) == static_cast<size_t>(StartedBy::kMpi) + 1);
  return kNames[static_cast<size_t>(started_by)];
}

bool SplitPlace(absl::string_view place, std::string* host, int* port) {
  const size_t colon = std::min(place.rfind(':'), place.size());
  absl::string_view name = place.substr(0, colon);
  const bool has_brackets =
      absl::StartsWith(name, "[") && absl::EndsWith(name, "]");
  if (has_brackets) name = name.substr(1, name.size() - 2);
  *host = std::string(name);
  return !name.empty() && name.find_first_of("[]") == name.npos &&
         (has_brackets || !absl::StrContains(name, ':')) &&
         colon < place.size() &&
         absl::SimpleAtoi(place.substr(colon + 1), port) && *port >= 1 &&
         *port <= kMaxPort;
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
  return Reader(get).Read();
}

namespace {

int CoresOfAffinity() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  // The host has more cores than the set has room for.
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  return std::max(1, CPU_COUNT(&cores));
}

// Returns how many cores a control group may use, or infinity.
double QuotaOf(const ControlGroup& group) {
  const std::string name = absl::StrCat(group.folder, "/cpu.");
  std::string quota;
  std::string period;
  if (group.is_version_2) {
    std::ifstream(name + "max") >> quota >> period;
  } else {
    std::ifstream(name + "cfs_quota_us") >> quota;
    std::ifstream(name + "cfs_period_us") >> period;
  }
  double time = 0;
  double of = 0;
  const bool is_limit = absl::SimpleAtod(quota, &time) &&
                        absl::SimpleAtod(period, &of) && time > 0 && of > 0;
  return is_limit ? time / of : std::numeric_limits<double>::infinity();
}

}  // namespace

int UsableCores(const std::string& root) {
  double cores = CoresOfAffinity();
  for (const ControlGroup& group : ControlGroups("cpu", root)) {
    cores = std::min(cores, QuotaOf(group));
  }
  return std::max(1, static_cast<int>(std::ceil(cores)));
}

int ThreadsPerRank(int ranks_on_host) {
  const char* const variable = std::getenv("OMP_NUM_THREADS");
  int threads = 0;
  if (variable != nullptr && absl::SimpleAtoi(variable, &threads) &&
      threads > 0) {
    return threads;
  }
  return std::max(1, UsableCores() / std::max(1, ranks_on_host));
}

}  // namespace fsdp::comm
