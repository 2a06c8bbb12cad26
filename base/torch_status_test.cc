#include "base/torch_status.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/exception.h>

#include <cstdint>
#include <new>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

template <typename E>
absl::Status Thrown() {
  return TorchToStatus("gather of blocks.3", [] {
    throw E({"Thrown", __FILE__, static_cast<uint32_t>(__LINE__)}, "the text");
  });
}

TEST(TorchToStatusTest, MapsEveryKindOfTorchError) {
  const auto text = AllOf(HasSubstr("gather of blocks.3: "),
                          HasSubstr("the text"), Not(HasSubstr("frame #")));
  using Code = absl::StatusCode;
  EXPECT_THAT(Thrown<c10::OutOfMemoryError>(),
              StatusIs(Code::kResourceExhausted, text));
  EXPECT_THAT(Thrown<c10::NotImplementedError>(),
              StatusIs(Code::kUnimplemented, text));
  EXPECT_THAT(Thrown<c10::IndexError>(), StatusIs(Code::kOutOfRange, text));
  EXPECT_THAT(Thrown<c10::ValueError>(),
              StatusIs(Code::kInvalidArgument, text));
  EXPECT_THAT(Thrown<c10::TypeError>(), StatusIs(Code::kInvalidArgument, text));
  EXPECT_THAT(Thrown<c10d::TimeoutError>(),
              StatusIs(Code::kDeadlineExceeded, text));
  EXPECT_THAT(Thrown<c10::DistNetworkError>(),
              StatusIs(Code::kUnavailable, text));
  EXPECT_THAT(Thrown<c10::DistStoreError>(),
              StatusIs(Code::kUnavailable, text));
  EXPECT_THAT(Thrown<c10::DistBackendError>(),
              StatusIs(Code::kUnavailable, text));
  EXPECT_THAT(Thrown<c10::Error>(), StatusIs(Code::kInternal, text));
}

TEST(TorchToStatusTest, TheMarkOfMisuseMakesItAFailedPrecondition) {
  const std::string text = absl::StrCat("sharded", kMisuseMark);
  EXPECT_THAT(
      TorchToStatus("x", [&] { TORCH_CHECK(false, text); }),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("x: sharded")));
  EXPECT_THAT(
      TorchToStatus("x", [&] { throw std::runtime_error(text); }),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("x: sharded")));
}

TEST(TorchToStatusTest, MapsStandardExceptionsAndUnwrapsOurOwn) {
  EXPECT_OK(TorchToStatus("x", [] {}));
  EXPECT_THAT(TorchToStatus("x", [] { throw std::bad_alloc(); }),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("x: ")));
  EXPECT_THAT(TorchToStatus("x", [] { throw std::runtime_error("bad"); }),
              StatusIs(absl::StatusCode::kUnknown, "x: bad"));
  EXPECT_THAT(
      TorchToStatus("x", [] { ThrowIfError(absl::AbortedError("peer")); }),
      StatusIs(absl::StatusCode::kAborted, "peer"));
}

// This is a function, which no capture keeps alive.
absl::Status FailedTraining() { return absl::DataLossError("row 7"); }

TEST(TorchToStatusTest, WhatAFunctionReturnsIsTheStatus) {
  const auto lost = StatusIs(absl::StatusCode::kDataLoss, "row 7");
  EXPECT_THAT(TorchToStatus("training", FailedTraining), lost);
  EXPECT_THAT(TorchToStatus("training", &FailedTraining), lost);
  EXPECT_THAT(TorchToStatus("training", [] { return FailedTraining(); }), lost);
  EXPECT_THAT(TorchToStatus([] { return std::string("training"); },
                            [] { return FailedTraining(); }),
              lost);
  EXPECT_OK(TorchToStatus("training", [] { return absl::OkStatus(); }));
}

template <typename Result>
constexpr bool kTaken = std::is_constructible_v<FallibleRef, Result (*)()>;

TEST(TorchToStatusTest, ResultsThatWouldBeLostDoNotCompile) {
  EXPECT_TRUE(kTaken<void>);
  EXPECT_TRUE(kTaken<absl::Status>);
  EXPECT_FALSE(kTaken<absl::StatusOr<int>>);
  EXPECT_FALSE(kTaken<const absl::Status&>);
  EXPECT_FALSE(kTaken<bool>);
  EXPECT_FALSE(kTaken<at::Tensor>);
}

TEST(TorchToStatusTest, OutOfMemoryOnTheHostSaysHowMuchWasAskedFor) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's allocator ends the process";
#endif
  // This is more than there are addresses.
  const auto allocate = [] { at::empty({int64_t{1} << 50}, at::kFloat); };
  const auto exhausted =
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("a layer: "),
                     HasSubstr(absl::StrCat(int64_t{1} << 52, " bytes"))));
  EXPECT_THAT(TorchToStatus("a layer", allocate), exhausted);
  // TorchScript throws such an error on as text.
  EXPECT_THAT(TorchToStatus("a layer",
                            [&] {
                              try {
                                allocate();
                              } catch (const c10::Error& error) {
                                throw std::runtime_error(error.what());
                              }
                            }),
              exhausted);
}

TEST(TorchToStatusTest, MakesATextOnlyWhenItIsNeeded) {
  int asked = 0;
  const auto text = [&] {
    ++asked;
    return std::string("gather of blocks.3");
  };
  EXPECT_OK(TorchToStatus(text, [] {}));
  EXPECT_EQ(asked, 0);
  EXPECT_THAT(
      TorchToStatus(text, [] { throw std::runtime_error("the text"); }),
      StatusIs(absl::StatusCode::kUnknown, "gather of blocks.3: the text"));
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace fsdp
