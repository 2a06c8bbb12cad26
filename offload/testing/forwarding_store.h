// A store that passes everything on, for tests to derive from.
#ifndef OFFLOAD_TESTING_FORWARDING_STORE_H_
#define OFFLOAD_TESTING_FORWARDING_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "offload/param_store.h"

namespace fsdp::offload::testing {

class ForwardingStore : public ParamStore {
 public:
  explicit ForwardingStore(std::unique_ptr<ParamStore> base)
      : base_(std::move(base)) {}

  absl::Status Create(absl::string_view region, int64_t bytes) override {
    return base_->Create(region, bytes);
  }
  absl::Status Erase(absl::string_view region) override {
    return base_->Erase(region);
  }
  absl::StatusOr<int64_t> Size(absl::string_view region) const override {
    return base_->Size(region);
  }
  absl::StatusOr<std::unique_ptr<Transfer>> Read(
      absl::string_view region, int64_t offset, absl::Span<char> out) override {
    return base_->Read(region, offset, out);
  }
  absl::StatusOr<std::unique_ptr<Transfer>> Write(
      absl::string_view region, int64_t offset,
      absl::Span<const char> in) override {
    return base_->Write(region, offset, in);
  }
  absl::StatusOr<std::unique_ptr<Transfer>> Flush() override {
    return base_->Flush();
  }
  absl::Status Rollback() override { return base_->Rollback(); }
  StoreStats Stats() const override { return base_->Stats(); }
  std::string Describe() const override { return base_->Describe(); }

 private:
  const std::unique_ptr<ParamStore> base_;
};

}  // namespace fsdp::offload::testing

#endif  // OFFLOAD_TESTING_FORWARDING_STORE_H_
