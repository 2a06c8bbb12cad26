// The tests that every ParamStore passes.
#ifndef OFFLOAD_TESTING_PARAM_STORE_CONTRACT_H_
#define OFFLOAD_TESTING_PARAM_STORE_CONTRACT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

// A store under test: its test names one per way of making it,
//   INSTANTIATE_TEST_SUITE_P(Host, ParamStoreContract,
//                            ::testing::Values(StoreUnderTest{...}),
//                            StoreName);
// and links :param_store_contract.
struct StoreUnderTest {
  std::string name;
  std::function<absl::StatusOr<std::unique_ptr<ParamStore>>(int64_t capacity)>
      make;
  bool can_roll_back = false;
};

std::ostream& operator<<(std::ostream& out, const StoreUnderTest& store);
std::string StoreName(const ::testing::TestParamInfo<StoreUnderTest>& info);

class ParamStoreContract : public ::testing::TestWithParam<StoreUnderTest> {
 protected:
  // Makes the store of a test; stops the test program if that fails.
  static std::unique_ptr<ParamStore> Make(int64_t capacity);
};

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_PARAM_STORE_CONTRACT_H_
