// Gloo as it sits in libtorch_cpu.so works by way of the declarations beside
// this file.

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "gtest/gtest.h"

namespace fsdp {
namespace {

TEST(GlooTest, GathersAndReducesOverTwoRanks) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<at::Tensor> gathered(2);
  std::vector<at::Tensor> reduced(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      auto options = c10d::ProcessGroupGloo::Options::create();
      options->devices = {
          c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
      auto group =
          c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, 2, options);
      at::Tensor mine = at::full({3}, static_cast<float>(rank));
      gathered[rank] = at::zeros({6});
      group->_allgather_base(gathered[rank], mine)->wait();
      at::Tensor all = at::arange(4, at::kFloat);
      reduced[rank] = at::zeros({2});
      group->_reduce_scatter_base(reduced[rank], all)->wait();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(gathered[rank].narrow(0, 0, 3).eq(0).all().item<bool>());
    EXPECT_TRUE(gathered[rank].narrow(0, 3, 3).eq(1).all().item<bool>());
    EXPECT_EQ(reduced[rank][0].item<float>(), 4.0F * static_cast<float>(rank));
    EXPECT_EQ(reduced[rank][1].item<float>(),
              4.0F * static_cast<float>(rank) + 2.0F);
  }
}

}  // namespace
}  // namespace fsdp
