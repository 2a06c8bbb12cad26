#include <stdlib.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/file_engine.h"
#include "offload/system_calls.h"

namespace fsdp::offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class IoQueueTest : public ::testing::TestWithParam<QueueKind> {
 protected:
  IoQueueTest() {
    std::string path = ::testing::TempDir() + "/io_queue_XXXXXX";
    descriptor_ = mkstemp(path.data());
    unlink(path.c_str());
  }
  ~IoQueueTest() override { close(descriptor_); }

  std::unique_ptr<IoQueue> Make(int depth) const {
    return SystemCalls::Real()
        .MakeQueue(GetParam(), descriptor_, depth)
        .value();
  }

  int descriptor_ = -1;
};

INSTANTIATE_TEST_SUITE_P(Queues, IoQueueTest,
                         ::testing::Values(QueueKind::kIoUring,
                                           QueueKind::kThreads),
                         [](const ::testing::TestParamInfo<QueueKind>& info) {
                           return info.index == 0 ? "uring" : "threads";
                         });

// Waits until as many requests are over as were started.
std::vector<IoRequest*> WaitForAll(IoQueue& queue, size_t started) {
  std::vector<IoRequest*> all;
  std::vector<IoRequest*> over;
  while (all.size() < started) {
    queue.Wait(over);
    all.insert(all.end(), over.begin(), over.end());
  }
  return all;
}

TEST_P(IoQueueTest, MovesAsManyAtATimeAsItsDepth) {
  const auto queue = Make(5);
  EXPECT_EQ(queue->depth(), 5);
  EXPECT_THAT(queue->Describe(), ::testing::HasSubstr("5"));
  for (int round = 0; round < 20; ++round) {
    std::vector<std::string> bytes;
    bytes.reserve(5);
    std::vector<IoRequest> requests(5);
    for (int i = 0; i < 5; ++i) {
      bytes.push_back(std::string(1021, static_cast<char>('a' + i + round)));
    }
    for (const auto kind : {IoRequest::Kind::kWrite, IoRequest::Kind::kSync,
                            IoRequest::Kind::kRead}) {
      const bool moves = kind != IoRequest::Kind::kSync;
      for (int i = 0; i < 5; ++i) {
        requests[i] = {kind, bytes[i].data(), moves ? 1021 : 0,
                       int64_t{1021} * i, -1};
        queue->Start(&requests[i]);
      }
      EXPECT_EQ(WaitForAll(*queue, 5).size(), 5);
      for (int i = 0; i < 5; ++i) {
        EXPECT_EQ(requests[i].result, moves ? 1021 : 0);
        EXPECT_EQ(bytes[i],
                  std::string(1021, static_cast<char>('a' + i + round)));
        if (kind == IoRequest::Kind::kSync) bytes[i].assign(1021, '?');
      }
    }
  }
}

TEST_P(IoQueueTest, ReturnsWhatTheSystemSays) {
  const auto queue = Make(2);
  std::string bytes = "0123456789";
  ASSERT_EQ(pwrite(descriptor_, "abc", 3, 0), 3);
  IoRequest end{IoRequest::Kind::kRead, bytes.data(), 10, 1, -1};
  IoRequest negative{IoRequest::Kind::kWrite, bytes.data(), 10, -4096, -1};
  queue->Start(&end);
  queue->Start(&negative);
  WaitForAll(*queue, 2);
  EXPECT_EQ(end.result, 2);
  EXPECT_EQ(bytes, "bc23456789");
  EXPECT_EQ(negative.result, -EINVAL)
      << std::strerror(static_cast<int>(-negative.result));
}

TEST_P(IoQueueTest, WakesBeforeAndDuringAWait) {
  const auto queue = Make(1);
  std::vector<IoRequest*> over;
  queue->Wake();
  queue->Wait(over);
  EXPECT_TRUE(over.empty());
  for (int round = 0; round < 50; ++round) {
    std::thread other([&] { queue->Wake(); });
    queue->Wait(over);
    EXPECT_TRUE(over.empty());
    other.join();
  }
}

TEST_P(IoQueueTest, AWakeLosesNoRequest) {
  const auto queue = Make(3);
  std::string bytes(4096, 'x');
  for (int round = 0; round < 100; ++round) {
    IoRequest requests[3];
    for (int i = 0; i < 3; ++i) {
      requests[i] = {IoRequest::Kind::kWrite, bytes.data(), 4096,
                     int64_t{4096} * i, -1};
      queue->Start(&requests[i]);
      queue->Wake();
    }
    EXPECT_EQ(WaitForAll(*queue, 3).size(), 3);
    for (const IoRequest& request : requests) EXPECT_EQ(request.result, 4096);
  }
}

TEST(UringQueueTest, SaysWhyTheKernelRefuses) {
  const auto queue =
      SystemCalls::Real().MakeQueue(QueueKind::kIoUring, 0, 1 << 20);
  ASSERT_FALSE(queue.ok());
  EXPECT_EQ(queue.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(queue.status().message()),
              ::testing::HasSubstr("io_uring refused: "));
}

class BlockOrderTest : public ::testing::Test {
 protected:
  BlockOrderTest() {
    for (Piece* piece : {&read1_, &read2_, &read3_, &write1_, &write2_}) {
      piece->block = &block_;
    }
    write1_.writes = write2_.writes = true;
  }

  bool Enter(Piece& piece) { return order_.Enter(&piece); }
  std::vector<Piece*> Leave(const Piece& piece) {
    std::vector<Piece*> next;
    order_.Leave(piece, next);
    return next;
  }

  BlockOrder order_;
  Block block_;
  Block other_;
  Piece read1_, read2_, read3_, write1_, write2_;
};

TEST_F(BlockOrderTest, ReadsRunTogether) {
  EXPECT_TRUE(Enter(read1_));
  EXPECT_TRUE(Enter(read2_));
  EXPECT_THAT(Leave(read1_), IsEmpty());
  EXPECT_THAT(Leave(read2_), IsEmpty());
  EXPECT_TRUE(order_.empty());
}

TEST_F(BlockOrderTest, AWriteIsAlone) {
  EXPECT_TRUE(Enter(write1_));
  EXPECT_FALSE(Enter(write2_));
  EXPECT_FALSE(Enter(read1_));
  EXPECT_FALSE(Enter(read2_));
  EXPECT_THAT(Leave(write1_), ElementsAre(&write2_));
  EXPECT_THAT(Leave(write2_), ElementsAre(&read1_, &read2_));
}

TEST_F(BlockOrderTest, AReadDoesNotOvertakeAWriteThatWaits) {
  EXPECT_TRUE(Enter(read1_));
  EXPECT_FALSE(Enter(write1_));
  EXPECT_FALSE(Enter(read2_));
  EXPECT_THAT(Leave(read1_), ElementsAre(&write1_));
  EXPECT_FALSE(Enter(read3_));
  EXPECT_THAT(Leave(write1_), ElementsAre(&read2_, &read3_));
}

TEST_F(BlockOrderTest, AWriteWaitsForAllReads) {
  EXPECT_TRUE(Enter(read1_));
  EXPECT_TRUE(Enter(read2_));
  EXPECT_FALSE(Enter(write1_));
  EXPECT_THAT(Leave(read1_), IsEmpty());
  EXPECT_THAT(Leave(read2_), ElementsAre(&write1_));
}

TEST_F(BlockOrderTest, OtherBlocksDoNotMatter) {
  write2_.block = &other_;
  EXPECT_TRUE(Enter(write1_));
  EXPECT_TRUE(Enter(write2_));
  EXPECT_THAT(Leave(write1_), IsEmpty());
  EXPECT_THAT(Leave(write2_), IsEmpty());
  EXPECT_TRUE(order_.empty());
}

}  // namespace
}  // namespace fsdp::offload
