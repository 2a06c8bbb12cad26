// A rank's record as a message to ranks of other hosts.
#ifndef COMM_INSPECTION_RECORD_CODEC_H_
#define COMM_INSPECTION_RECORD_CODEC_H_

#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "comm/inspection/flight_recorder.h"

namespace fsdp::comm {

inline constexpr int kSentOperations = 16;  // the last ones
inline constexpr size_t kMaxEncodedBytes = 4096;

// Of kMaxEncodedBytes at most.
std::string EncodeRecord(const RankRecord& record);

// Nothing for what is no record: of more bytes, or others than EncodeRecord()
// makes. What it gives is as bounded as what EncodeRecord() has been given, and
// its text can be printed.
std::optional<RankRecord> DecodeRecord(absl::string_view bytes);

}  // namespace fsdp::comm

#endif  // COMM_INSPECTION_RECORD_CODEC_H_
