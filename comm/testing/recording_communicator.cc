#include "comm/testing/recording_communicator.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/wrappers/forwarding_communicator.h"

namespace fsdp::comm {
namespace {

class RecordingCommunicator final : public ForwardingCommunicator {
 public:
  RecordingCommunicator(std::unique_ptr<Communicator> base, CollectiveLog* log)
      : ForwardingCommunicator(std::move(base)), log_(log) {}

  bool CanBeCaptured() const override { return base().CanBeCaptured(); }

  CreatedCommunicator Split(int color, int key) override {
    FSDP_ASSIGN_OR_RETURN(auto group, base().Split(color, key));
    return Record(std::move(group), log_);
  }

 protected:
  StartedWork DoCollective(const CollectiveArgs& args,
                           absl::string_view label) override {
    StartedWork work = base().StartCollective(args, label);
    if (work.ok()) {
      log_->Add({args.collective, std::string(label),
                 static_cast<int64_t>(args.whole().nbytes())});
    }
    return work;
  }

 private:
  CollectiveLog* const log_;
};

}  // namespace

std::string ToString(const CollectiveRecord& record) {
  return absl::StrCat(CollectiveName(record.collective), " of ", record.label,
                      ", ", record.bytes, " bytes");
}

void CollectiveLog::Add(CollectiveRecord record) {
  absl::MutexLock lock(&mutex_);
  Totals& totals = totals_[{record.collective, record.label}];
  ++totals.count;
  totals.bytes += record.bytes;
  if (static_cast<int64_t>(trace_.size()) < max_trace_) {
    trace_.push_back(std::move(record));
  }
}

void CollectiveLog::Clear() {
  absl::MutexLock lock(&mutex_);
  totals_.clear();
  trace_.clear();
}

CollectiveLog::Totals CollectiveLog::TotalsOf(Collective collective) const {
  absl::MutexLock lock(&mutex_);
  Totals sum;
  for (const auto& [key, totals] : totals_) {
    if (key.first != collective) continue;
    sum.count += totals.count;
    sum.bytes += totals.bytes;
  }
  return sum;
}

CollectiveLog::Totals CollectiveLog::TotalsOf(Collective collective,
                                              absl::string_view label) const {
  absl::MutexLock lock(&mutex_);
  const auto found = totals_.find({collective, std::string(label)});
  return found == totals_.end() ? Totals() : found->second;
}

std::vector<CollectiveRecord> CollectiveLog::Trace() const {
  absl::MutexLock lock(&mutex_);
  return trace_;
}

std::unique_ptr<Communicator> Record(std::unique_ptr<Communicator> base,
                                     CollectiveLog* log) {
  return std::make_unique<RecordingCommunicator>(std::move(base), log);
}

}  // namespace fsdp::comm
