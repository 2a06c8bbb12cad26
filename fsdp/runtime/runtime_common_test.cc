#include "fsdp/runtime/runtime_common.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::AddFlat;
using ::fsdp::testing::EmptyUnit;

void Add(const char* name, c10::ScalarType stored, c10::ScalarType computed,
         const comm::Communicator& world, RuntimeUnit& unit) {
  AddFlat({{name, {at::zeros({4}, stored)}}}, computed, world, unit);
}

TEST(RuntimeCommonTest, LabelsTellTheFlatParametersOfAUnitApart) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(1));
  const std::shared_ptr<comm::Communicator> world = std::move(group[0]);
  std::vector<RuntimeUnit> units;
  units.push_back(EmptyUnit("one", {world, {}, {}}));
  Add("p", at::kFloat, at::kFloat, *world, units[0]);
  units.push_back(EmptyUnit("several", {world, {}, {}}));
  Add("p", at::kFloat, at::kFloat, *world, units[1]);
  Add("q", at::kFloat, at::kBFloat16, *world, units[1]);
  Add("frozen", at::kFloat, at::kFloat, *world, units[1]);
  const RuntimeCommon common(world, std::move(units), absl::Seconds(20));
  EXPECT_EQ(common.label(0, 0), "one");
  EXPECT_EQ(common.label(1, 0), "several/Float");
  EXPECT_EQ(common.label(1, 1), "several/Float in BFloat16");
  EXPECT_EQ(common.label(1, 2), "several/Float from frozen on");
}

}  // namespace
}  // namespace fsdp
