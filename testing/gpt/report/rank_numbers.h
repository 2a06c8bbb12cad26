// Numbers of all ranks, for reports.
#ifndef TESTING_GPT_REPORT_RANK_NUMBERS_H_
#define TESTING_GPT_REPORT_RANK_NUMBERS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace gpt {

// Returns `mine` of each rank, by rank. Collective; all pass equally many.
absl::StatusOr<std::vector<std::vector<int64_t>>> GatherNumbers(
    const std::vector<int64_t>& mine, absl::string_view label,
    fsdp::comm::Communicator& communicator);

}  // namespace gpt

#endif  // TESTING_GPT_REPORT_RANK_NUMBERS_H_
