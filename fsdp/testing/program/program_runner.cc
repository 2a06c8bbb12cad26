#include "fsdp/testing/program/program_runner.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/hierarchical/host_layout.h"
#include "comm/local/local_communicator.h"
#include "comm/startup/environment.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_fuzzer.h"
#include "fsdp/testing/program/sharded_program.h"

namespace fsdp::testing {
namespace {

using comm::Communicator;
using Group = std::vector<std::unique_ptr<Communicator>>;

absl::StatusOr<Group> LocalRanks(int ranks, absl::Duration /*timeout*/,
                                 std::vector<int> world_ranks) {
  comm::LocalGroupOptions options;
  options.world_ranks = std::move(world_ranks);
  return comm::CreateLocalGroup(ranks, options);
}

absl::StatusOr<Group> MakeGroup(const Program& p) {
  comm::HostLayout hosts;
  hosts.num_hosts = CountOf(p.hosts, p.ranks);
  hosts.ranks_per_host = p.ranks / hosts.num_hosts;
  switch (p.group) {
    case kSharedGroup:
      return comm::testing::CreateSharedMemoryGroup(p.ranks);
    case kGlooGroup:
      return comm::testing::CreateGlooGroup(p.ranks);
    case kSharedHosts:
      return comm::testing::CreateHierarchicalGroup(
          hosts, comm::testing::CreateSharedMemoryGroup, LocalRanks);
    case kLocalHosts:
      return comm::testing::CreateHierarchicalGroup(hosts, LocalRanks,
                                                    LocalRanks);
    default:
      return comm::CreateLocalGroup(p.ranks);
  }
}

absl::Status RunInThreads(const Program& program,
                          const std::string& directory) {
  ProgramRecord record;
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      "the plain program", [&] { record = RunPlainProgram(program); }));
  FSDP_ASSIGN_OR_RETURN(const Group group, MakeGroup(program));
  return comm::testing::AllOk(
      comm::testing::RunRanks(group, [&](Communicator& world) {
        return RunShardedProgram(program, record, world, directory);
      }));
}

absl::Status RunAsRank(const Program& program, const std::string& directory,
                       Communicator& world) {
  absl::Status status;
  FSDP_RETURN_IF_ERROR(TorchToStatus(absl::StrCat("rank ", world.rank()), [&] {
    status =
        RunShardedProgram(program, RunPlainProgram(program), world, directory);
  }));
  return Annotate(status, absl::StrCat("rank ", world.rank()));
}

// A directory below `scratch` that is removed with the object.
class Directory {
 public:
  Directory(const std::string& scratch, absl::string_view name)
      : path_(absl::StrCat(scratch, "/", name)) {
    std::filesystem::create_directories(path_);
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  ~Directory() {
    std::error_code unused;
    std::filesystem::remove_all(path_, unused);
  }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

}  // namespace

ProgramOutcome RunProgram(const Program& program, const std::string& scratch) {
  const Directory directory(scratch, "program");
  return OutcomeOf(RunInThreads(program, directory.path()));
}

absl::Status WriteBatchEnd(const std::string& path, const BatchEnd& end) {
  std::ofstream out(path, std::ios::trunc);
  out << end.index << " " << end.outcome.kind << "\n" << end.outcome.text;
  out.close();
  if (out.good()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::StatusOr<BatchEnd> ReadBatchEnd(const std::string& path) {
  std::ifstream in(path);
  BatchEnd end;
  int kind = 0;
  if (!(in >> end.index >> kind)) {
    return absl::NotFoundError(absl::StrCat("no report in ", path));
  }
  end.outcome.kind = static_cast<ProgramOutcome::Kind>(kind);
  in.get();
  end.outcome.text.assign(std::istreambuf_iterator<char>(in), {});
  return end;
}

BatchEnd RunBatchAsRank(const std::vector<Program>& programs,
                        const std::string& scratch, const std::string& report) {
  const auto connect = []() -> absl::StatusOr<std::unique_ptr<Communicator>> {
    FSDP_ASSIGN_OR_RETURN(const comm::Environment environment,
                          comm::ReadEnvironment(std::getenv));
    comm::ConnectOptions options;
    options.backend = comm::Backend::kSharedMemory;
    options.timeout = absl::Minutes(1);
    return comm::Connect(environment, options);
  };
  const auto world = connect();
  if (!world.ok()) return {0, OutcomeOf(world.status())};
  for (size_t i = 0; i < programs.size(); ++i) {
    const BatchEnd halfway{i, {ProgramOutcome::kFails, "the process ended"}};
    const absl::Status noted = WriteBatchEnd(report, halfway);
    if (!noted.ok()) return {i, OutcomeOf(noted)};
    // All ranks name the same folder, which the parent removes.
    const std::string path = absl::StrCat(scratch, "/", i);
    std::filesystem::create_directories(path);
    const absl::Status status = RunAsRank(programs[i], path, **world);
    const ProgramOutcome outcome = OutcomeOf(status);
    if (!outcome.is_failure()) continue;
    (*world)->Abort(status);
    return {i, outcome};
  }
  return {programs.size(), ProgramOutcome()};
}

}  // namespace fsdp::testing
