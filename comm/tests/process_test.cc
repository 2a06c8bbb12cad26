// Tests what the survivors of a group say when one of its processes dies or
// stops. Ranks are this program started again with --rank.
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/shared_memory/shared_memory_communicator.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::ChildProcess;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr absl::Duration kLimit = absl::Seconds(30);
// The deadline of the second call in tests in which it has to pass.
constexpr int kDeadlineSeconds = 2;
// More than sockets buffer, so that a transfer does not end by itself.
constexpr int64_t kLargeElements = 16 << 20;

struct RankArgs {
  bool shares_memory = false;  // instead of Gloo
  int rank = 0;
  int port = 0;        // of the store; 0: this rank serves it
  int victim = 0;      // the rank that takes no part in the second call
  bool joins = false;  // the victim takes part, and large data is moved
  int deadline_s = 0;  // of the second call
};

absl::Status Gather(Communicator& comm, int64_t size, absl::string_view label,
                    absl::Duration limit) {
  const at::Tensor in = at::zeros({size});
  const at::Tensor out = at::zeros({size * kRanks});
  FSDP_ASSIGN_OR_RETURN(auto work, comm.AllGather(out, in, label));
  std::printf("started\n");
  std::fflush(stdout);
  return work->Wait(absl::Now() + limit);
}

c10::intrusive_ptr<c10d::Store> OpenStore(const RankArgs& args) {
  c10d::TCPStoreOptions options;
  options.isServer = args.port == 0;
  options.port = static_cast<uint16_t>(args.port);
  options.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  if (args.port == 0) std::printf("port %d\n", store->getPort());
  std::fflush(stdout);
  return store;
}

CreatedCommunicator Connect(const RankArgs& args,
                            const c10::intrusive_ptr<c10d::Store>& store) {
  if (args.shares_memory) {
    SharedMemoryOptions options;
    options.timeout = kLimit;
    return CreateSharedMemoryCommunicator(store, args.rank, kRanks, options);
  }
  GlooOptions options;
  options.hostname = "127.0.0.1";
  options.timeout = kLimit;
  options.diagnosis_timeout = absl::Seconds(3);
  return CreateGlooCommunicator(store, args.rank, kRanks, options);
}

void Report(const absl::Status& status) {
  std::printf("status %s\n", status.ToString().c_str());
  std::fflush(stdout);
}

// The test sends SIGUSR1, which main() has blocked.
void AwaitGo() {
  int signal = 0;
  sigset_t go;
  sigprocmask(SIG_BLOCK, nullptr, &go);
  sigwait(&go, &signal);
}

void StayUntilTheTestEnds() {
  while (true) pause();
}

absl::Status RunRank(const RankArgs& args) {
  c10::intrusive_ptr<c10d::Store> store;
  FSDP_RETURN_IF_ERROR(
      TorchToStatus("open the store", [&] { store = OpenStore(args); }));
  FSDP_ASSIGN_OR_RETURN(auto comm, Connect(args, store));
  FSDP_RETURN_IF_ERROR(Gather(*comm, 8, "blocks.1", kLimit));
  std::printf("ready\n");
  std::fflush(stdout);
  if (args.rank == args.victim && !args.joins) StayUntilTheTestEnds();
  AwaitGo();
  Report(Gather(*comm, args.joins ? kLargeElements : 8, "blocks.2",
                absl::Seconds(args.deadline_s)));
  // The rank keeps the store, which the others may still be asking what has
  // happened.
  StayUntilTheTestEnds();
  return absl::OkStatus();
}

std::string CommandOf(const RankArgs& args) {
  return absl::StrCat("'", ::fsdp::testing::ProgramPath(),
                      "' --rank=", args.rank, ",", args.port, ",", args.victim,
                      ",", int{args.joins}, ",", int{args.shares_memory}, ",",
                      args.deadline_s);
}

class RankProcesses {
 public:
  explicit RankProcesses(RankArgs args) : args_(args) {
    for (args.rank = 0; args.rank < kRanks; ++args.rank) {
      processes_.push_back(std::make_unique<ChildProcess>(CommandOf(args)));
      if (args.rank > 0) continue;
      FSDP_CHECK(absl::SimpleAtoi(processes_[0]->Await("port ").substr(5),
                                  &args.port));
    }
    for (const auto& process : processes_) {
      EXPECT_NE(process->Await("ready"), "");
    }
  }

  ChildProcess& operator[](int rank) { return *processes_[rank]; }

  // The others meet with what has become of the victim until then.
  void Go() {
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      const bool takes_part =
          args_.joins || static_cast<int>(rank) != args_.victim;
      if (takes_part) processes_[rank]->Signal(SIGUSR1);
    }
  }

 private:
  const RankArgs args_;
  std::vector<std::unique_ptr<ChildProcess>> processes_;
};

// Returns what the ranks but the victim say at the end, by rank. The victim
// gets `signal`, unless that is 0: before they go, or in its own transfer.
std::map<int, std::string> Survivors(const RankArgs& args, int signal) {
  RankProcesses ranks(args);
  if (args.joins) {
    ranks.Go();
    EXPECT_NE(ranks[args.victim].Await("started"), "");
  }
  if (signal != 0) ranks[args.victim].Signal(signal);
  if (!args.joins) ranks.Go();
  std::map<int, std::string> statuses;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank != args.victim) statuses[rank] = ranks[rank].Await("status ");
  }
  return statuses;
}

RankArgs ArgsOf(int victim, bool shares_memory, int deadline_s = 30) {
  return {shares_memory, 0, 0, victim, /*joins=*/false, deadline_s};
}

TEST(GlooProcessTest, AKilledRankIsNamedByTheOthers) {
  for (const auto& [rank, status] : Survivors(ArgsOf(2, false), SIGKILL)) {
    EXPECT_THAT(
        status,
        AllOf(HasSubstr("UNAVAILABLE"),
              HasSubstr(absl::StrCat("all-gather #1 of blocks.2 on rank ", rank,
                                     " of 3")),
              HasSubstr(absl::StrCat("rank ", 1 - rank,
                                     " is in all-gather #1 of blocks.2")),
              HasSubstr("rank 2 does not answer")));
  }
}

TEST(GlooProcessTest, StoppedAndLateRanksAreToldApart) {
  for (int signal : {0, SIGSTOP}) {
    for (const auto& [rank, status] :
         Survivors(ArgsOf(2, false, kDeadlineSeconds), signal)) {
      EXPECT_THAT(
          status,
          AllOf(ContainsRegex("DEADLINE_EXCEEDED|ABORTED"),
                HasSubstr("not done at the deadline"),
                HasSubstr("blocks.2 on rank"),
                HasSubstr(signal != 0 ? "rank 2 does not answer"
                                      : "rank 2 has finished all-gather "
                                        "#0 of blocks.1 and called "
                                        "nothing since")));
    }
  }
}

TEST(GlooProcessTest, ADeathInTheMiddleOfATransferIsNoticed) {
  RankArgs args = ArgsOf(2, false);
  args.joins = true;
  for (const auto& [rank, status] : Survivors(args, SIGKILL)) {
    EXPECT_THAT(status,
                AllOf(HasSubstr("blocks.2 on rank"), HasSubstr("rank 2")));
  }
}

// Rank 0 serves the store, by which the others tell each other what they know.
TEST(GlooProcessTest, SurvivorsEndWithoutTheStore) {
  for (int signal : {SIGKILL, SIGSTOP}) {
    for (const auto& [rank, status] :
         Survivors(ArgsOf(0, false, kDeadlineSeconds), signal)) {
      EXPECT_THAT(status, AllOf(HasSubstr("blocks.2 on rank"),
                                HasSubstr("the store does not answer")));
    }
  }
}

TEST(SharedMemoryProcessTest, AKilledRankIsNamedByTheOthers) {
  for (int victim : {0, 2}) {
    for (const auto& [rank, status] :
         Survivors(ArgsOf(victim, true), SIGKILL)) {
      EXPECT_THAT(
          status,
          AllOf(HasSubstr("UNAVAILABLE"),
                HasSubstr(absl::StrCat("all-gather #1 of blocks.2 on rank ",
                                       rank, " of 3")),
                ContainsRegex(absl::StrCat(
                    "rank ", victim,
                    " .last seen in all-gather #0 of "
                    "blocks.1; process [0-9]+ has ended. is gone"))));
    }
  }
}

TEST(SharedMemoryProcessTest, StoppedAndLateRanksAreToldApart) {
  for (int signal : {0, SIGSTOP}) {
    for (const auto& [rank, status] :
         Survivors(ArgsOf(2, true, kDeadlineSeconds), signal)) {
      EXPECT_THAT(
          status,
          AllOf(ContainsRegex("DEADLINE_EXCEEDED|ABORTED"),
                HasSubstr("not done at the deadline; still missing: rank 2"),
                HasSubstr(signal != 0 ? " is stopped" : " runs")));
    }
  }
}

RankArgs ParseRankArgs(absl::string_view text) {
  const std::vector<std::string> fields = absl::StrSplit(text, ',');
  FSDP_CHECK(fields.size() == 6);
  RankArgs args;
  FSDP_CHECK(absl::SimpleAtoi(fields[0], &args.rank) &&
             absl::SimpleAtoi(fields[1], &args.port) &&
             absl::SimpleAtoi(fields[2], &args.victim) &&
             absl::SimpleAtoi(fields[5], &args.deadline_s));
  args.joins = fields[3] == "1";
  args.shares_memory = fields[4] == "1";
  return args;
}

}  // namespace
}  // namespace fsdp::comm

int main(int argc, char** argv) {
  absl::string_view arg = argc > 1 ? argv[1] : "";
  if (absl::ConsumePrefix(&arg, "--rank=")) {
    // The rank ends with the test.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigset_t go;
    sigemptyset(&go);
    sigaddset(&go, SIGUSR1);
    sigprocmask(SIG_BLOCK, &go, nullptr);
    fsdp::comm::Report(fsdp::comm::RunRank(fsdp::comm::ParseRankArgs(arg)));
    return 0;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
