#include "offload/commit_record.h"

#include "base/testing/status_matchers.h"

namespace fsdp::offload {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::_;
using ::testing::HasSubstr;

FileHeader Header() {
  FileHeader header;
  header.file_id = 0x1234567890abcdef;
  header.run = 0xfedcba0987654321;
  header.capacity = 1 << 20;
  header.block_bytes = 8192;
  header.max_regions = 7;
  header.owner = "rank 3 of 5";
  return header;
}

CommitRecord Record() {
  CommitRecord record;
  record.file_id = Header().file_id;
  record.commit = 41;
  const auto region =
      std::make_shared<StoredRegion>("blocks.3, exp_avg", 8193, 4096, 8192);
  region->blocks[0].current = {1, 2};
  region->blocks[1].current = {3, 4};
  region->blocks[1].place = 1;
  record.regions.push_back(region);
  record.regions.push_back(
      std::make_shared<StoredRegion>(std::string("\0", 1), 0, 0, 8192));
  return record;
}

void Flip(std::string& bytes, size_t bit) {
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
}

TEST(CommitRecordTest, HeadersComeBack) {
  const std::string bytes = Header().Encode();
  EXPECT_EQ(bytes.size(), kHeaderBytes);
  ASSERT_OK_AND_ASSIGN(const FileHeader header, FileHeader::Decode(bytes));
  EXPECT_EQ(header.Encode(), bytes);
  EXPECT_EQ(header.owner, "rank 3 of 5");
  EXPECT_EQ(header.run, 0xfedcba0987654321);
}

TEST(CommitRecordTest, RecordsComeBackWhateverFollowsThem) {
  const std::string bytes = Record().Encode();
  ASSERT_OK_AND_ASSIGN(const CommitRecord record,
                       CommitRecord::Decode(bytes + "rest", Header()));
  EXPECT_EQ(record.Encode(), bytes);
  EXPECT_EQ(record.commit, 41);
  ASSERT_EQ(record.regions.size(), 2);
  EXPECT_EQ(record.regions[0]->blocks[1].current.checksum, 4);
}

TEST(CommitRecordTest, NoTornRecordIsTaken) {
  const std::string bytes = Record().Encode();
  const std::string old = std::string(bytes.size(), '\x5a');
  for (size_t written = 0; written < bytes.size(); ++written) {
    EXPECT_THAT(CommitRecord::Decode(
                    bytes.substr(0, written) + old.substr(written), Header()),
                StatusIs(absl::StatusCode::kDataLoss, _))
        << written;
    EXPECT_THAT(CommitRecord::Decode(bytes.substr(0, written), Header()),
                StatusIs(absl::StatusCode::kDataLoss, _));
  }
}

TEST(CommitRecordTest, EveryFlippedBitIsFound) {
  for (std::string bytes : {Record().Encode(), Header().Encode()}) {
    const bool is_header = bytes.size() == kHeaderBytes;
    // The rest of a header is padding.
    const size_t used = is_header ? 8 + 4 + 8 + 41 + 8 + 11 : bytes.size();
    for (size_t bit = 0; bit < used * 8; ++bit) {
      Flip(bytes, bit);
      const absl::Status status =
          is_header ? FileHeader::Decode(bytes).status()
                    : CommitRecord::Decode(bytes, Header()).status();
      // The first byte of a header is its version.
      EXPECT_EQ(status.code(), is_header && bit < 8
                                   ? absl::StatusCode::kFailedPrecondition
                                   : absl::StatusCode::kDataLoss)
          << bit;
      Flip(bytes, bit);
    }
  }
}

TEST(CommitRecordTest, RecordsOfAnotherFileAreNotTaken) {
  FileHeader other = Header();
  ++other.file_id;
  EXPECT_THAT(CommitRecord::Decode(Record().Encode(), other),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("another file")));
}

TEST(CommitRecordTest, RegionsThatCannotBeAreNotTaken) {
  for (const auto& [bytes, offset] : {std::pair<int64_t, int64_t>{-1, 0},
                                      {8193, -4096},
                                      {8193, 1 << 20},
                                      {1 << 21, 0},
                                      {8192, 0}}) {
    CommitRecord record = Record();
    record.regions[0]->bytes = bytes;
    record.regions[0]->offset = offset;
    EXPECT_THAT(CommitRecord::Decode(record.Encode(), Header()),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("cannot be")));
  }
}

TEST(CommitRecordTest, TheLargestRecordHasRoom) {
  const FileHeader header = Header();
  CommitRecord record = Record();
  record.regions.clear();
  // All regions have one byte, except the last, which has the rest.
  int64_t left = header.capacity;
  for (int64_t i = 0; i < header.max_regions; ++i) {
    const bool last = i + 1 == header.max_regions;
    const int64_t bytes = last ? left : 1;
    left -= StoredBytes(bytes);
    record.regions.push_back(std::make_shared<StoredRegion>(
        std::string(kMaxNameBytes, static_cast<char>('a' + i)), bytes, 0,
        header.block_bytes));
  }
  EXPECT_LE(record.Encode().size(), CommitRecord::MaxBytes(header));
  EXPECT_OK(CommitRecord::Decode(record.Encode(), header));
}

}  // namespace
}  // namespace fsdp::offload
