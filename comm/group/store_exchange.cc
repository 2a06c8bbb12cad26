#include "comm/group/store_exchange.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp::comm {
namespace {

std::string Key(absl::string_view topic, int rank) {
  return absl::StrCat(topic, "/", rank);
}

}  // namespace

bool AwaitKeys(c10d::Store& store, const std::vector<std::string>& keys,
               const WaitLimits& limits) {
  const absl::Time begin = absl::Now();
  while (!store.check(keys)) {
    if (limits.stopped() || limits.passed()) return false;
    const absl::Time now = absl::Now();
    const absl::Duration delay = std::clamp(
        (now - begin) / 10, absl::Milliseconds(1), absl::Milliseconds(200));
    absl::SleepFor(std::min(delay, limits.deadline - now));
  }
  return true;
}

absl::StatusOr<std::vector<std::string>> ExchangeByStore(
    const c10::intrusive_ptr<c10d::Store>& store, absl::string_view topic,
    int rank, const RankNames& names, absl::string_view value,
    absl::Time deadline) {
  const std::string what =
      absl::StrCat("exchanging ", topic, " on ", names.Place(rank));
  FSDP_RETURN_IF_ERROR(TorchToStatus(what, [&] {
    store->set(Key(topic, rank),
               std::vector<uint8_t>(value.begin(), value.end()));
  }));
  std::vector<std::string> values;
  for (int peer = 0; peer < names.size(); ++peer) {
    bool has_come = false;
    std::vector<uint8_t> bytes;
    const absl::Status status = TorchToStatus(what, [&] {
      has_come = AwaitKeys(*store, {Key(topic, peer)}, {deadline});
      if (has_come) bytes = store->get(Key(topic, peer));
    });
    if (!status.ok()) return absl::UnavailableError(status.message());
    if (!has_come) {
      return absl::DeadlineExceededError(
          absl::StrCat(what, ": ", names.Name(peer), " has not come"));
    }
    values.emplace_back(bytes.begin(), bytes.end());
  }
  return values;
}

}  // namespace fsdp::comm
