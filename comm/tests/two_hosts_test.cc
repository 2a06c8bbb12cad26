// Runs processes on two hosts that are network namespaces of this machine or,
// if it does not allow those, on hosts that differ by name only: the output
// says which. Ranks are this program started again with --rank.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/fnv1a.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::Finish;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::RunCommand;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Seconds(30);
constexpr int kNoNamespaces = 77;
constexpr int kRanks = 4;

// Returns numbers small enough for sums that are exact in any order.
at::Tensor Numbers(int rank, int64_t size) {
  return (at::arange(size) * 7 + rank * 3).remainder(1000).to(at::kFloat);
}

uint64_t Hash(uint64_t hash, const at::Tensor& tensor) {
  return Fnv1a(
      {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()},
      hash);
}

// Returns a hash of what this rank gets from every collective of `comm`.
absl::StatusOr<uint64_t> RunCollectives(Communicator& comm) {
  uint64_t hash = kFnv1a;
  const int rank = comm.rank();
  for (int64_t size : {0, 1, 1021, 300'007}) {
    const at::Tensor whole = at::empty({size * comm.world_size()});
    FSDP_RETURN_IF_ERROR(
        Finish(comm.AllGather(whole, Numbers(rank, size), "gather")));
    hash = Hash(hash, whole);
    const at::Tensor shard = at::empty({size});
    FSDP_RETURN_IF_ERROR(
        Finish(comm.ReduceScatter(shard, whole, ReduceOp::kSum, "scatter")));
    hash = Hash(hash, shard);
    const at::Tensor all = Numbers(rank, size);
    FSDP_RETURN_IF_ERROR(Finish(comm.AllReduce(all, ReduceOp::kMax, "reduce")));
    hash = Hash(hash, all);
    for (int root = 0; root < comm.world_size(); ++root) {
      const at::Tensor copied = Numbers(rank, size);
      FSDP_RETURN_IF_ERROR(Finish(comm.Broadcast(copied, root, "copy")));
      hash = Hash(hash, copied);
    }
  }
  return hash;
}

// Moves 16 MB per collective.
absl::Status MoveMuch(Communicator& comm) {
  const at::Tensor whole = at::zeros({4 << 20});
  const int64_t size = whole.numel() / comm.world_size();
  const at::Tensor shard = whole.narrow(0, comm.rank() * size, size);
  FSDP_RETURN_IF_ERROR(Finish(comm.AllGather(whole, shard, "gather")));
  FSDP_RETURN_IF_ERROR(
      Finish(comm.ReduceScatter(shard, whole, ReduceOp::kSum, "scatter")));
  return Finish(comm.AllReduce(whole, ReduceOp::kSum, "reduce"));
}

absl::StatusOr<std::shared_ptr<Communicator>> ConnectRank(
    absl::string_view task) {
  FSDP_ASSIGN_OR_RETURN(const Environment environment,
                        ReadEnvironment(std::getenv));
  ConnectOptions options;
  options.connect_timeout = options.timeout = kLimit;
  if (task != "one_host") options.host = std::getenv("TWO_HOSTS_NAME");
  if (task == "much_gloo") options.backend = Backend::kGloo;
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> world,
                        Connect(environment, options));
  return world;
}

// Returns hashes of the world's collectives, then of its rows and columns.
absl::StatusOr<std::string> Collectives(
    const std::shared_ptr<Communicator>& world) {
  FSDP_ASSIGN_OR_RETURN(uint64_t hash, RunCollectives(*world));
  std::string text = absl::StrCat("world ", hash);
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh,
                        Mesh::Create(world, {{"replicate", 2}, {"shard", 2}}));
  for (int i : {0, 1}) {
    FSDP_ASSIGN_OR_RETURN(hash, RunCollectives(*mesh.group(i)));
    absl::StrAppend(&text, " ", mesh.dimension(i).name, " ", hash);
  }
  return text;
}

// `task` is "collectives" on two hosts or "one_host"; "die0" or "die3", in
// which that rank dies; "much" or "much_gloo".
absl::Status RunRank(absl::string_view task) {
  FSDP_ASSIGN_OR_RETURN(const auto world, ConnectRank(task));
  if (absl::StartsWith(task, "much")) return MoveMuch(*world);
  const int rank = world->rank();
  FSDP_ASSIGN_OR_RETURN(const std::string text, Collectives(world));
  std::printf("rank %d is %s\nrank %d has %s\n", rank,
              world->ToString().c_str(), rank, text.c_str());
  std::fflush(stdout);
  if (!absl::ConsumePrefix(&task, "die")) return absl::OkStatus();
  if (task == absl::StrCat(rank)) _exit(0);
  const absl::StatusOr<uint64_t> broken = RunCollectives(*world);
  std::printf("rank %d ends with %s\n", rank,
              broken.status().ToString().c_str());
  return broken.ok() ? absl::InternalError("went on without a rank")
                     : absl::OkStatus();
}

std::string Command(absl::string_view task) {
  return absl::StrCat("comm/testing/two_hosts.sh 2 ",
                      ::fsdp::testing::ProgramPath(), " --rank=", task);
}

ProgramOutcome RunOnLoopback(absl::string_view task) {
  const int port = Listen("127.0.0.1", 0)->port;
  return RunCommand(
      absl::StrCat("TWO_HOSTS_LOOPBACK=", port, " ", Command(task)));
}

ProgramOutcome RunOnTwoHosts(absl::string_view task) {
  ProgramOutcome outcome = RunCommand(Command(task));
  if (outcome.code != kNoNamespaces) {
    std::printf("two network namespaces are the hosts\n");
    return outcome;
  }
  std::printf(
      "NOTE: no network namespaces here, so the hosts differ by name only: "
      "%s",
      outcome.output.c_str());
  return RunOnLoopback(task);
}

// Returns the lines that begin with "rank N `what`", without that, by rank.
std::vector<std::string> Lines(const ProgramOutcome& outcome,
                               absl::string_view what) {
  std::vector<std::string> lines(kRanks);
  for (absl::string_view line : absl::StrSplit(outcome.output, '\n')) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string prefix = absl::StrCat("rank ", rank, " ", what, " ");
      if (!absl::StartsWith(line, prefix)) continue;
      lines[rank] = std::string(line.substr(prefix.size()));
    }
  }
  return lines;
}

TEST(TwoHostsTest, GetWhatOneHostGets) {
  const ProgramOutcome one = RunOnLoopback("one_host");
  ASSERT_EQ(one.code, 0) << one.output;
  EXPECT_THAT(Lines(one, "is"), Each(HasSubstr("shared memory, rank")));
  EXPECT_THAT(Lines(one, "has"), Each(HasSubstr("world")));
  const ProgramOutcome two = RunOnTwoHosts("collectives");
  ASSERT_EQ(two.code, 0) << two.output;
  EXPECT_THAT(Lines(two, "is"),
              Each(HasSubstr("hierarchical (shared memory inside 2 hosts, gloo "
                             "between them)")));
  EXPECT_EQ(Lines(two, "has"), Lines(one, "has"));
}

// Returns the bytes between the hosts; unknown if they differ by name only.
std::optional<int64_t> BytesOf(const ProgramOutcome& outcome) {
  constexpr absl::string_view kBegin = "between the hosts went ";
  const size_t begin = outcome.output.find(std::string(kBegin));
  if (begin == std::string::npos) return std::nullopt;
  return std::atoll(outcome.output.c_str() + begin + kBegin.size());
}

TEST(TwoHostsTest, HostsOfTwoRanksExchangeHalfOfWhatPlainGlooSends) {
  const ProgramOutcome hierarchical = RunOnTwoHosts("much");
  const ProgramOutcome gloo = RunOnTwoHosts("much_gloo");
  EXPECT_EQ(hierarchical.code, 0) << hierarchical.output;
  EXPECT_EQ(gloo.code, 0) << gloo.output;
  const std::optional<int64_t> bytes = BytesOf(hierarchical);
  if (!bytes.has_value()) {
    std::printf("NOTE: no cable, so nothing is known of what went over it\n");
    return;
  }
  std::printf("hierarchical %lld bytes, gloo %lld\n",
              static_cast<long long>(*bytes),
              static_cast<long long>(BytesOf(gloo).value_or(0)));
  EXPECT_GT(*bytes, 3 * (16 << 20));
  EXPECT_LT(*bytes, BytesOf(gloo).value_or(0) * 6 / 10);
}

// Rank 0 serves the store, by which ranks of different hosts tell each other.
TEST(TwoHostsTest, ARankThatDiesEndsTheOthersOnBothHosts) {
  for (int victim : {0, 3}) {
    const ProgramOutcome outcome = RunOnTwoHosts(absl::StrCat("die", victim));
    ASSERT_EQ(outcome.code, 0) << outcome.output;
    const std::vector<std::string> ends = Lines(outcome, "ends with");
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      EXPECT_THAT(
          ends[rank],
          ::testing::AllOf(HasSubstr("UNAVAILABLE"),
                           HasSubstr(absl::StrCat("on rank ", rank, " of 4"))))
          << outcome.output;
    }
  }
}

}  // namespace
}  // namespace fsdp::comm

int main(int argc, char** argv) {
  const absl::string_view arg = argc > 1 ? argv[1] : "";
  constexpr absl::string_view kRank = "--rank=";
  if (absl::StartsWith(arg, kRank)) {
    const absl::Status status = fsdp::comm::RunRank(arg.substr(kRank.size()));
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return status.ok() ? 0 : 1;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
