// Collectives on one GPU beside device copies of as many bytes: NCCL in a group
// of one rank, and N ranks that this process plays (--ranks=N, by default 4).
//   ./bazelw run --config=opt --config=cuda //benchmarks:gpu_collectives
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/strings/str_cat.h"
#include "base/status_error.h"
#include "benchmarks/gpu_collectives_run.h"
#include "benchmarks/gpu_run.h"
#include "comm/communicator.h"
#include "comm/nccl_communicator.h"

namespace fsdp::benchmarks {
namespace {

constexpr int kPlayedRanks = 4;

std::shared_ptr<comm::Communicator> NcclGroup(const Place& place) {
  comm::NcclOptions options;
  options.device = place.device.index();
  return ValueOrThrow(
      comm::CreateNcclCommunicator(c10::make_intrusive<c10d::HashStore>(),
                                   /*rank=*/0, /*world_size=*/1, options));
}

void AddAll(const Place& place, int turns) {
  Place played = place;
  if (played.ranks == 1) played.ranks = kPlayedRanks;
  const std::string of_played = absl::StrCat("loopback_of_", played.ranks);
  for (const DeviceCollective collective :
       {DeviceCollective::kAllGather, DeviceCollective::kReduceScatter}) {
    const std::string name = collective == DeviceCollective::kAllGather
                                 ? "all_gather/"
                                 : "reduce_scatter/";
    for (const int64_t mib : {1, 16, 256}) {
      const int64_t bytes = mib << 20;
      // Equal shards, of whole numbers.
      const int64_t granule =
          int64_t{played.ranks} * static_cast<int64_t>(sizeof(float));
      const std::string size = absl::StrCat("/", mib, "_MiB");
      AddBenchmark(name + of_played + size, turns, [=] {
        return MakeCollectiveRun(collective, bytes / granule * granule,
                                 place.device, LoopbackGroup(played));
      });
      if (!place.device.is_cuda()) continue;
      AddBenchmark(name + "nccl" + size, turns, [=] {
        return MakeCollectiveRun(collective, bytes, place.device,
                                 NcclGroup(place));
      });
    }
  }
}

}  // namespace
}  // namespace fsdp::benchmarks

int main(int argc, char** argv) {
  return fsdp::benchmarks::RunBenchmarks(argc, argv, fsdp::benchmarks::AddAll);
}
