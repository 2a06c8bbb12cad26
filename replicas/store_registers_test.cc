#include "replicas/store_registers.h"

#include <array>

#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"
#include "replicas/membership/testing/registers_contract.h"
#include "replicas/testing/test_keeper.h"

namespace fsdp::replicas {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::HasSubstr;

// The same run's registers for each that connects.
struct Keeper : testing::TestKeeper {
  using TestKeeper::TestKeeper;

  absl::StatusOr<std::unique_ptr<StoreRegisters>> Connect(
      const std::string& prefix = "test") const {
    return StoreRegisters::Connect(
        {place().keeper_addr, place().keeper_port, place().secret}, prefix,
        {absl::Now() + absl::Seconds(20)});
  }
};

// Keeps the keeper, too.
std::shared_ptr<Registers> View(const std::shared_ptr<Keeper>& keeper) {
  return {ValueOrThrow(keeper->Connect()).release(),
          [keeper](Registers* registers) { delete registers; }};
}

using testing::RegistersContract;
INSTANTIATE_TEST_SUITE_P(
    Store, RegistersContract,
    ::testing::Values([]() -> std::array<std::shared_ptr<Registers>, 2> {
      const auto keeper = std::make_shared<Keeper>();
      return {View(keeper), View(keeper)};
    }));

TEST(StoreRegistersTest, PrefixesKeepRunsApart) {
  const Keeper keeper;
  ASSERT_OK_AND_ASSIGN(const auto one, keeper.Connect("one"));
  ASSERT_OK_AND_ASSIGN(const auto other, keeper.Connect("other"));
  ASSERT_OK(one->Set("key", "value"));
  ASSERT_OK_AND_ASSIGN(const auto found, other->Get("key"));
  EXPECT_EQ(found, std::nullopt);
}

TEST(StoreRegistersTest, AllThatBeginsWithAPrefixIsRemoved) {
  const Keeper keeper;
  ASSERT_OK_AND_ASSIGN(const auto registers, keeper.Connect());
  for (const std::string key : {"epoch/1/a", "epoch/1/b", "epoch/11/a"}) {
    ASSERT_OK(registers->Set(key, "value"));
  }
  ASSERT_OK(registers->RemoveAll("epoch/1/"));
  ASSERT_OK_AND_ASSIGN(const auto removed, registers->Get("epoch/1/b"));
  EXPECT_EQ(removed, std::nullopt);
  ASSERT_OK_AND_ASSIGN(const auto other, registers->Get("epoch/11/a"));
  EXPECT_EQ(other, "value");
}

TEST(StoreRegistersTest, AKeeperThatIsGoneIsUnavailable) {
  Keeper keeper;
  ASSERT_OK_AND_ASSIGN(const auto registers, keeper.Connect());
  keeper.End();
  EXPECT_THAT(registers->Set("key", "value"),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("keeper")));
  EXPECT_THAT(registers->Await("key", absl::Now() + absl::Milliseconds(50)),
              StatusIs(absl::StatusCode::kUnavailable, _));
}

TEST(StoreRegistersTest, AKeeperThatWasStartedAnewIsNotTakenForTheOldOne) {
  Keeper keeper;
  ASSERT_OK_AND_ASSIGN(const auto registers, keeper.Connect());
  ASSERT_OK(registers->Set("key", "value"));
  keeper.End();
  EXPECT_THAT(registers->Get("key").status(),
              StatusIs(absl::StatusCode::kUnavailable, _));
  const Keeper successor(keeper.place().keeper_port);
  EXPECT_THAT(
      registers->Get("key").status(),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("anew")));
  EXPECT_THAT(
      registers->CompareAndSet("key", "", "mine").status(),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("anew")));
}

TEST(StoreRegistersTest, WhoDoesNotKnowTheSecretGetsNothing) {
  const Keeper keeper;
  EXPECT_THAT(StoreRegisters::Connect({keeper.place().keeper_addr,
                                       keeper.place().keeper_port, "another"},
                                      "test", {absl::Now() + absl::Seconds(20)})
                  .status(),
              StatusIs(absl::StatusCode::kPermissionDenied, _));
}

}  // namespace
}  // namespace fsdp::replicas
