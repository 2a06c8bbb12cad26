#include "fsdp/testing/program/program_runner.h"

#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/hierarchical/host_layout.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/program/plain_program.h"
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

}  // namespace

ProgramOutcome RunProgram(const Program& program, const std::string& scratch) {
  const std::string directory = absl::StrCat(scratch, "/program");
  std::filesystem::create_directories(directory);
  ProgramOutcome outcome = OutcomeOf(RunInThreads(program, directory));
  std::error_code unused;
  std::filesystem::remove_all(directory, unused);
  return outcome;
}

}  // namespace fsdp::testing
