#include "comm/group/c10d_status.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using Code = absl::StatusCode;

TEST(C10dStatusTest, ConnectionErrorsKeepTheirFirstLineWithoutThePlace) {
  const struct {
    std::string text;
    std::string shortened;
  } cases[] = {
      {"", ""},
      {"connection closed", "connection closed"},
      {"sum: [/src/gloo/pair.cc:547] Connection closed by peer",
       "sum: Connection closed by peer"},
      {"[/src/pair.cc:5] reset\nException raised from (frame 0)\n", "reset"},
      // These are no places: a range, and one that does not end.
      {"rank [1] of 2", "rank [1] of 2"},
      {"[/src/pair.cc:5 reset", "[/src/pair.cc:5 reset"},
      {"closed\n[/src/pair.cc:5] frame", "closed"},
      {"[1] [/src/pair.cc:5] reset", "[1] reset"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(ConnectionError(absl::UnknownError(c.text)),
              absl::UnavailableError(c.shortened))
        << c.text;
  }
}

TEST(C10dStatusTest, WhatCallsReturnAndThrow) {
  EXPECT_OK(C10dToStatus("sum", [] {}));
  EXPECT_THAT(C10dToStatus("sum",
                           [] {
                             throw std::runtime_error(
                                 "[/src/pair.cc:5] Connection reset");
                           }),
              StatusIs(Code::kUnavailable, "sum: Connection reset"));
  EXPECT_THAT(C10dToStatus("sum",
                           [] {
                             TORCH_CHECK(false, "Backend mpi does not support ",
                                         "alltoall");
                           }),
              StatusIs(Code::kUnimplemented,
                       "sum: Backend mpi does not support alltoall"));
  EXPECT_THAT(C10dToStatus("sum", [] { TORCH_CHECK(false, "a bug\nframe"); }),
              StatusIs(Code::kInternal, "sum: a bug"));
  // Our own error for an argument does not say that a backend lacks something.
  EXPECT_THAT(
      C10dToStatus("sum",
                   [] { TORCH_CHECK_VALUE(false, "does not support this"); }),
      StatusIs(Code::kInvalidArgument, "sum: does not support this"));
}

}  // namespace
}  // namespace fsdp::comm
