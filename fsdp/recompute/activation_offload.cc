#include "fsdp/recompute/activation_offload.h"

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "absl/algorithm/container.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/recompute/packed_form.h"
#include "fsdp/recompute/tensor_transfers.h"
#include "offload/file_store.h"
#include "offload/host_store.h"
#include "offload/page_memory.h"

namespace fsdp {

class ABSL_SCOPED_LOCKABLE ActivationOffload::Turn {
 public:
  explicit Turn(ActivationOffload& offload)
      ABSL_EXCLUSIVE_LOCK_FUNCTION(offload.mutex_)
      : offload_(offload) {
    offload.mutex_.Lock();
    offload.transfers_->Poll();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() ABSL_UNLOCK_FUNCTION() {
    offload_.transfers_->Poll();
    const std::vector<at::Tensor> dropped = offload_.transfers_->TakeDropped();
    offload_.mutex_.Unlock();
  }

 private:
  ActivationOffload& offload_;
};

bool ActivationOffload::Has(const Next& next, const MovedTensorPtr& tensor) {
  return std::any_of(next.begin(), next.end(), [&](const auto* moved) {
    return absl::c_linear_search(moved->tensors_, tensor);
  });
}

absl::StatusOr<std::shared_ptr<ActivationOffload>> ActivationOffload::Make(
    std::unique_ptr<offload::ParamStore> store,
    const ActivationOffloadOptions& options) {
  return MakeAt(/*pages=*/nullptr, std::move(store), options);
}

absl::StatusOr<std::shared_ptr<ActivationOffload>>
ActivationOffload::MakeInHostMemory(int64_t capacity, c10::Device device,
                                    const ActivationOffloadOptions& options) {
  std::unique_ptr<offload::PageAllocator> pages =
      absl::make_unique<LockedPages>(device);
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<offload::HostStore> store,
                        offload::HostStore::Make(capacity, *pages));
  return MakeAt(std::move(pages), std::move(store), options);
}

absl::StatusOr<std::shared_ptr<ActivationOffload>>
ActivationOffload::MakeInFile(const std::string& directory, int64_t capacity,
                              const ActivationOffloadOptions& options) {
  offload::FileStoreOptions file;
  file.directory = directory;
  file.capacity = capacity;
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<offload::FileStore> store,
                        offload::FileStore::Make(file));
  return Make(std::move(store), options);
}

absl::StatusOr<std::shared_ptr<ActivationOffload>> ActivationOffload::MakeAt(
    std::unique_ptr<offload::PageAllocator>&& pages,
    std::unique_ptr<offload::ParamStore> store,
    const ActivationOffloadOptions& options) {
  if (options.min_bytes < 0 || options.window_bytes < 0 ||
      options.regions_ahead < 0 || options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "offload activations: min_bytes ", options.min_bytes, ", window_bytes ",
        options.window_bytes, ", regions_ahead ", options.regions_ahead,
        ", timeout ", absl::FormatDuration(options.timeout),
        ": none may be negative, and the timeout not zero"));
  }
  return std::shared_ptr<ActivationOffload>(
      new ActivationOffload(std::move(pages), std::move(store), options));
}

ActivationOffload::ActivationOffload(
    std::unique_ptr<offload::PageAllocator> pages,
    std::unique_ptr<offload::ParamStore> store,
    const ActivationOffloadOptions& options)
    : options_(options),
      pages_(std::move(pages)),
      transfers_(absl::make_unique<TensorTransfers>(
          std::move(store), options.window_bytes, options.timeout,
          options.activity)),
      store_(transfers_->store()) {}

ActivationOffload::~ActivationOffload() = default;

std::unique_ptr<MovedArguments> ActivationOffload::MoveOut(
    const std::vector<at::Tensor*>& tensors, absl::string_view whose) {
  auto moved = absl::WrapUnique(new MovedArguments(shared_from_this(), whose));
  bool any = false;
  {
    std::vector<at::Tensor> taken;
    const Turn turn(*this);
    for (at::Tensor* tensor : tensors) {
      moved->tensors_.push_back(Take(*tensor, whose));
      if (moved->tensors_.back() == nullptr) continue;
      taken.push_back(std::exchange(*tensor, at::Tensor()));
      any = true;
    }
    moved->id_ = next_id_++;
    if (any) moved_.emplace(moved->id_, moved.get());
  }
  WarnOfFirstFailure();
  if (!any) return nullptr;
  return moved;
}

MovedTensorPtr ActivationOffload::Take(const at::Tensor& tensor,
                                       absl::string_view whose) {
  if (!tensor.defined() || !tensor.is_floating_point()) return nullptr;
  const std::optional<PackedForm> form = PackedForm::Of(tensor);
  if (!form.has_value() || form->bytes() < options_.min_bytes) return nullptr;
  const auto same = by_source_.find(tensor.storage().unsafeGetStorageImpl());
  if (same != by_source_.end()) {
    for (const MovedTensorPtr& known : same->second) {
      if (known->form == *form && known->address == tensor.const_data_ptr() &&
          known->version == tensor._version()) {
        ++known->owners;
        return known;
      }
    }
  }
  std::string region = absl::StrCat("activation ", next_id_++, " of ", whose);
  region.resize(std::min<size_t>(region.size(), offload::kMaxNameBytes));
  MovedTensorPtr moved = transfers_->Write(tensor, *form, std::move(region));
  if (moved == nullptr) return nullptr;
  moved->source = tensor.storage().getWeakStorageImpl();
  moved->address = tensor.const_data_ptr();
  moved->version = tensor._version();
  by_source_[tensor.storage().unsafeGetStorageImpl()].push_back(moved);
  return moved;
}

absl::StatusOr<std::vector<at::Tensor>> ActivationOffload::MoveIn(
    MovedArguments& moved) {
  const Turn turn(*this);
  ++moved.times_in_;
  const std::vector<MovedTensorPtr>& tensors = moved.tensors_;
  for (auto i = tensors.begin(); i != tensors.end(); ++i) {
    if (*i == nullptr || std::find(tensors.begin(), i, *i) != i) continue;
    const MovedTensor& tensor = **i;
    ++(!tensor.packed.defined()                      ? stats_.missed
       : tensor.in_store && !tensor.IsBeingWritten() ? stats_.prefetched
                                                     : stats_.found);
  }
  const auto failed = [&](size_t i, const absl::Status& status) {
    return Annotate(
        status,
        absl::StrCat("move tensor ", i, " in the arguments of ", moved.whose_,
                     ", ", tensors[i]->form.ToString(), ", back into memory"));
  };
  std::vector<at::Tensor> result(tensors.size());
  // Starts all reads before it waits for the first.
  for (size_t i = 0; i < result.size(); ++i) {
    if (tensors[i] == nullptr) continue;
    const absl::Status started =
        transfers_->StartRead(tensors[i], /*ahead=*/false);
    if (!started.ok()) return failed(i, started);
  }
  for (size_t i = 0; i < result.size(); ++i) {
    if (tensors[i] == nullptr) continue;
    auto read = transfers_->Read(tensors[i]);
    if (!read.ok()) return failed(i, read.status());
    result[i] = *std::move(read);
  }
  const Next next = NextAfter(moved);
  for (const MovedTensorPtr& tensor : tensors) {
    if (tensor != nullptr && !Has(next, tensor)) transfers_->Drop(tensor);
  }
  ReadAhead(next);
  return result;
}

// Skips arguments that were in memory in this pass already: a region inside
// another one comes after it in forward, and before it in backward.
ActivationOffload::Next ActivationOffload::NextAfter(
    const MovedArguments& moved) {
  Next next;
  auto before = moved_.find(moved.id_);
  while (before != moved_.begin() &&
         static_cast<int>(next.size()) < options_.regions_ahead) {
    --before;
    if (before->second->times_in_ < moved.times_in_) {
      next.push_back(before->second);
    }
  }
  return next;
}

void ActivationOffload::ReadAhead(const Next& next) {
  for (const MovedArguments* moved : next) {
    for (const MovedTensorPtr& tensor : moved->tensors_) {
      if (tensor == nullptr) continue;
      if (tensor->packed.defined()) {
        transfers_->Keep(tensor);
      } else if (!MakeRoomToRead(tensor->form.bytes(), next) ||
                 !transfers_->StartRead(tensor, /*ahead=*/true).ok()) {
        return;
      }
    }
  }
}

bool ActivationOffload::MakeRoomToRead(int64_t bytes, const Next& next) {
  while (!transfers_->HasRoomToRead(bytes)) {
    const auto& reading = transfers_->reading();
    const auto victim = std::find_if(
        reading.begin(), reading.end(), [&](const MovedTensorPtr& tensor) {
          return tensor->CanDrop() && !Has(next, tensor);
        });
    if (victim == reading.end()) return false;
    transfers_->Drop(MovedTensorPtr(*victim));
  }
  return true;
}

void ActivationOffload::Erase(const MovedArguments& moved) {
  const Turn turn(*this);
  moved_.erase(moved.id_);
  for (const MovedTensorPtr& tensor : moved.tensors_) {
    if (tensor == nullptr || --tensor->owners > 0) continue;
    const auto found = by_source_.find(tensor->source._unsafe_get_target());
    std::vector<MovedTensorPtr>& same = found->second;
    same.erase(std::find(same.begin(), same.end(), tensor));
    if (same.empty()) by_source_.erase(found);
    transfers_->Abandon(tensor);
  }
}

ActivationOffloadStats ActivationOffload::stats() {
  const Turn turn(*this);
  const offload::StoreStats store = store_.Stats();
  static_cast<TensorTransferStats&>(stats_) = transfers_->stats();
  stats_.stored_bytes = store.used_bytes;
  stats_.peak_stored_bytes = store.peak_used_bytes;
  return stats_;
}

void ActivationOffload::WarnOfFirstFailure() {
  absl::Status failure;
  {
    const absl::MutexLock lock(&mutex_);
    failure = transfers_->TakeFailure();
    if (failure.ok() || std::exchange(warned_, true)) return;
  }
  TORCH_WARN(
      "fsdp: an argument of a checkpointed region that was to be offloaded "
      "stays in memory, and so may others (see ActivationOffloadStats): ",
      failure.ToString());
}

absl::StatusOr<std::vector<at::Tensor>> MovedArguments::MoveIn() {
  auto result = offload_->MoveIn(*this);
  offload_->WarnOfFirstFailure();
  return result;
}

MovedArguments::~MovedArguments() { offload_->Erase(*this); }

}  // namespace fsdp
