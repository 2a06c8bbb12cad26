#include "offload/testing/faulty_store.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/host_store.h"
#include "offload/page_memory.h"
#include "offload/testing/param_store_contract.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

std::unique_ptr<ParamStore> Faulty(std::vector<Fault> faults) {
  std::unique_ptr<ParamStore> store = *HostStore::Make(1 << 20);
  EXPECT_OK(store->Create("a", 10));
  EXPECT_OK(store->Create("b", 10));
  return WithFaults(std::move(store), std::move(faults));
}

Fault Of(Fault::Operation operation, Fault::Effect effect) {
  Fault fault;
  fault.operation = operation;
  fault.effect = effect;
  return fault;
}

INSTANTIATE_TEST_SUITE_P(
    Faulty, ParamStoreContract,
    ::testing::Values(
        StoreUnderTest{"without_faults",
                       [](int64_t capacity)
                           -> absl::StatusOr<std::unique_ptr<ParamStore>> {
                         FSDP_ASSIGN_OR_RETURN(auto base,
                                               HostStore::Make(capacity));
                         return WithFaults(std::move(base), {});
                       }},
        StoreUnderTest{"with_rollback",
                       [](int64_t capacity)
                           -> absl::StatusOr<std::unique_ptr<ParamStore>> {
                         FSDP_ASSIGN_OR_RETURN(
                             auto base,
                             HostStore::Make(capacity, PageAllocator::System(),
                                             true));
                         return WithFaults(std::move(base), {});
                       },
                       /*can_roll_back=*/true},
        StoreUnderTest{"with_delays",
                       [](int64_t capacity)
                           -> absl::StatusOr<std::unique_ptr<ParamStore>> {
                         FSDP_ASSIGN_OR_RETURN(auto base,
                                               HostStore::Make(capacity));
                         Fault delay =
                             Of(Fault::Operation::kAny, Fault::Effect::kDelay);
                         delay.count = 20;
                         return WithFaults(std::move(base), {delay});
                       }}),
    StoreName);

TEST(FaultyStoreTest, FailsTheNthThatFits) {
  Fault fault = Of(Fault::Operation::kWrite, Fault::Effect::kFail);
  fault.region = "b";
  fault.nth = 1;
  fault.count = 2;
  fault.error = absl::ResourceExhaustedError("full");
  const auto store = Faulty({fault});
  const auto full =
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("full"));
  EXPECT_OK(WriteNow(*store, "b", 0, "1"));
  EXPECT_OK(WriteNow(*store, "a", 0, "2"));
  EXPECT_OK(ReadNow(*store, "b", 0, 1));
  EXPECT_THAT(WriteNow(*store, "b", 0, "3"), full);
  EXPECT_THAT(WriteNow(*store, "b", 0, "4"), full);
  EXPECT_EQ(*ReadNow(*store, "b", 0, 1), "1");
  EXPECT_OK(WriteNow(*store, "b", 0, "5"));
  EXPECT_EQ(*ReadNow(*store, "b", 0, 1), "5");
}

TEST(FaultyStoreTest, RefusesTheCall) {
  const auto store =
      Faulty({Of(Fault::Operation::kFlush, Fault::Effect::kRefuse)});
  EXPECT_OK(WriteNow(*store, "a", 0, "1"));
  EXPECT_THAT(store->Flush(), StatusIs(absl::StatusCode::kUnavailable,
                                       HasSubstr("injected failure")));
  EXPECT_OK(Finish(store->Flush()));
}

TEST(FaultyStoreTest, DoesTheFirstHalf) {
  const auto store =
      Faulty({Of(Fault::Operation::kAny, Fault::Effect::kShorten)});
  EXPECT_THAT(WriteNow(*store, "a", 0, "12345678"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("injected")));
  EXPECT_EQ(*ReadNow(*store, "a", 0, 8), std::string("1234\0\0\0\0", 8));
}

TEST(FaultyStoreTest, ADelayedTransferHasADeadline) {
  Fault fault = Of(Fault::Operation::kRead, Fault::Effect::kDelay);
  fault.delay = absl::Milliseconds(50);
  const auto store = Faulty({fault});
  std::string bytes(1, '?');
  const absl::Time start = absl::Now();
  ASSERT_OK_AND_ASSIGN(const auto read,
                       store->Read("a", 0, absl::MakeSpan(bytes)));
  EXPECT_THAT(read->Wait(start),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("test")));
  EXPECT_OK(read->Wait(absl::InfiniteFuture()));
  EXPECT_GE(absl::Now() - start, fault.delay);
}

}  // namespace
}  // namespace fsdp::offload::testing
