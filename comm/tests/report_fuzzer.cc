// Statuses and reports of failures as peers may send them, under libFuzzer,
// whose flags, such as -max_total_time=300, come before DIR:
//   ./bazelw run --config=fuzz //comm/tests:report_fuzz -- DIR
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "comm/communicator.h"
#include "comm/group/failure_report.h"

namespace fsdp::comm {
namespace {

void CheckStatus(absl::string_view text) {
  const std::optional<absl::Status> status = DecodeStatus(text);
  if (!status.has_value()) return;
  FSDP_CHECK(DecodeStatus(EncodeStatus(*status)) == status);
}

void CheckReport(absl::string_view text) {
  const std::optional<RankReport> report = Decode(text);
  if (!report.has_value()) return;
  const std::optional<RankReport> again = Decode(Encode(*report));
  FSDP_CHECK(again.has_value() && again->cause == report->cause &&
             again->text == report->text &&
             again->position == report->position);
  // A rank judges the report beside its own and that of a rank that has said
  // nothing.
  const std::vector<std::optional<RankReport>> reports = {RankReport{},
                                                          std::nullopt, report};
  for (const bool store_answers : {false, true}) {
    FSDP_CHECK(!Verdict(/*rank=*/0, RankNames(3), reports, store_answers).ok());
  }
}

}  // namespace
}  // namespace fsdp::comm

// Stops the program if what is read does not read the same again, or does not
// explain a failure.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  fsdp::comm::CheckStatus(text);
  fsdp::comm::CheckReport(text);
  return 0;
}
