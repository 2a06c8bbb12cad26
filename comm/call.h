// The vocabulary of collectives: which there are, and what one rank asks for.
#ifndef COMM_CALL_H_
#define COMM_CALL_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::comm {

enum class Collective {
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllReduce,
  kBroadcast,
  kSplit,
};

// "all-gather".
absl::string_view CollectiveName(Collective collective);

enum class ReduceOp { kSum, kMin, kMax };

// "sum".
absl::string_view ReduceOpName(ReduceOp op);

// One rank's call, in the form in which ranks compare theirs and errors name
// it.
struct Call {
  Collective collective = Collective::kAllGather;
  std::string label;   // "blocks.2"
  std::string dtype;   // "float32"; empty where no tensor is involved
  int64_t count = 0;   // elements of one rank's shard, or of the whole tensor
  std::string detail;  // "sum", "root 2"; empty where there is nothing to say
};

bool operator==(const Call& a, const Call& b);
inline bool operator!=(const Call& a, const Call& b) { return !(a == b); }

// "all-gather of blocks.2 (float32 x 1024)".
std::string ToString(const Call& call);

// "all-gather #17 of blocks.2": `sequence` counts a group's calls from 0.
std::string Name(const Call& call, int64_t sequence);

}  // namespace fsdp::comm

#endif  // COMM_CALL_H_
