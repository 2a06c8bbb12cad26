// The part of the contract about going back to the last flush.
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/param_store.h"
#include "offload/testing/param_store_contract.h"
#include "offload/testing/store_calls.h"

namespace fsdp::offload::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

// Says what a test looks at after it wants to go back: a store that can has
// gone back; the others say that they cannot, and go on.
enum class After { kRollback, kRefusal };
After RollBack(ParamStore& store) {
  const absl::Status status = store.Rollback();
  if (ParamStoreContract::GetParam().can_roll_back) {
    EXPECT_OK(status);
    return After::kRollback;
  }
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnimplemented,
                               HasSubstr(store.Describe())));
  return After::kRefusal;
}

TEST_P(ParamStoreContract, RollbackGoesToTheLastFlush) {
  for (const int64_t size : {0, 1, 4096, 10007, 70001}) {
    const auto store = Make(1 << 20);
    ASSERT_OK(store->Create("region", size));
    std::string flushed(size, '\0');
    for (int step = 1; step <= 4; ++step) {
      std::string now = Pattern(step, size);
      ASSERT_OK(WriteNow(*store, "region", 0, now));
      ASSERT_OK(WriteNow(*store, "region", size / 3, Pattern(7, size / 2)));
      now.replace(size / 3, size / 2, Pattern(7, size / 2));
      if (step == 3) {
        ASSERT_OK(Finish(store->Flush()));
        flushed = now;
      }
      for (int again = 0; again < 2; ++again) {
        const After after = RollBack(*store);
        EXPECT_EQ(*ReadNow(*store, "region", 0, size),
                  after == After::kRollback ? flushed : now)
            << "step " << step << ", " << size << " bytes";
      }
    }
  }
}

TEST_P(ParamStoreContract, RollbackLeavesWhichRegionsThereAre) {
  const auto store = Make(1 << 20);
  ASSERT_OK(store->Create("kept", 5003));
  ASSERT_OK(store->Create("erased", 5003));
  ASSERT_OK(store->Create("replaced", 5003));
  for (const char* name : {"kept", "erased", "replaced"}) {
    ASSERT_OK(WriteNow(*store, name, 0, Pattern(1, 5003)));
  }
  ASSERT_OK(Finish(store->Flush()));
  ASSERT_OK(store->Erase("erased"));
  ASSERT_OK(store->Erase("replaced"));
  ASSERT_OK(store->Create("replaced", 9001));
  ASSERT_OK(store->Create("created", 9001));
  for (const char* name : {"replaced", "created"}) {
    ASSERT_OK(WriteNow(*store, name, 0, Pattern(2, 9001)));
  }
  const std::string wanted = RollBack(*store) == After::kRollback
                                 ? std::string(9001, '\0')
                                 : Pattern(2, 9001);
  EXPECT_EQ(*ReadNow(*store, "kept", 0, 5003), Pattern(1, 5003));
  EXPECT_EQ(*ReadNow(*store, "replaced", 0, 9001), wanted);
  EXPECT_EQ(*ReadNow(*store, "created", 0, 9001), wanted);
  EXPECT_THAT(store->Size("erased"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("'erased'")));
  ASSERT_OK(WriteNow(*store, "created", 8000, "some"));
  EXPECT_EQ(*ReadNow(*store, "created", 8000, 4), "some");
  ASSERT_OK(Finish(store->Flush()));
}

// Compares any sequence of all there is with strings.
TEST_P(ParamStoreContract, RollbackAtAnyTimeFindsTheLastFlush) {
  struct Model {
    std::string now;
    std::string flushed;
  };
  const auto store = Make(4 << 20);
  std::map<std::string, Model> regions;
  std::mt19937 random(3);
  const auto below = [&random](int64_t n) {
    return static_cast<int64_t>(random() % n);
  };
  for (int action = 0; action < 300; ++action) {
    const std::string name = absl::StrCat("region ", random() % 5);
    const uint32_t what = random() % 100;
    if (regions.count(name) == 0) {
      const std::string zeros(random() % 60000, '\0');
      ASSERT_OK(store->Create(name, zeros.size()));
      regions[name] = {zeros, zeros};
    } else if (what < 60) {
      std::string& now = regions[name].now;
      const auto size = static_cast<int64_t>(now.size());
      const int64_t offset = what < 30 ? 0 : below(size + 1);
      const int64_t left = size - offset;
      const std::string bytes =
          Pattern(action, what < 30 ? left : below(left + 1));
      ASSERT_OK(WriteNow(*store, name, offset, bytes));
      now.replace(offset, bytes.size(), bytes);
    } else if (what < 65) {
      ASSERT_OK(store->Erase(name));
      regions.erase(name);
    } else if (what < 82) {
      ASSERT_OK(Finish(store->Flush()));
      for (auto& [_, model] : regions) model.flushed = model.now;
    } else if (RollBack(*store) == After::kRollback) {
      for (auto& [_, model] : regions) model.now = model.flushed;
    }
    for (const auto& [region, model] : regions) {
      ASSERT_EQ(*ReadNow(*store, region, 0, model.now.size()), model.now)
          << region << ", action " << action;
    }
  }
}

}  // namespace
}  // namespace fsdp::offload::testing
