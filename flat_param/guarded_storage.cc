#include "flat_param/guarded_storage.h"

#include <c10/util/intrusive_ptr.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/torch_status.h"

namespace fsdp::flat_param {
namespace {

// These deleters free nothing. The deleter of a DataPtr shows whether its
// context is a tag, and of which kind.
void KeepTagOfUnsharded(void* /*tag*/) {}
void KeepTagOfResting(void* /*tag*/) {}

c10::DeleterFnPtr KeepTag(Guarded kind) {
  return kind == Guarded::kUnsharded ? &KeepTagOfUnsharded : &KeepTagOfResting;
}

absl::Status SelfCheckFailed(absl::string_view what) {
  return absl::InternalError(absl::StrCat(
      "this LibTorch's c10::StorageImpl is not the one this library was "
      "written for (",
      what, "); build against LibTorch 2.11"));
}

// Access to a private member by explicit instantiation, in which the language
// ignores access rules: the friend function hands the member pointer out.
template <typename Tag, bool c10::StorageImpl::*kMember>
struct FlagAccess {
  friend bool c10::StorageImpl::*FlagOf(Tag) { return kMember; }
};
struct ThrowOnAnyAccess {
  friend bool c10::StorageImpl::*FlagOf(ThrowOnAnyAccess);
};
struct HasMutableAccessCheck {
  friend bool c10::StorageImpl::*FlagOf(HasMutableAccessCheck);
};
template struct FlagAccess<ThrowOnAnyAccess,
                           &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct FlagAccess<HasMutableAccessCheck,
                           &c10::StorageImpl::has_mutable_data_ptr_check_>;

}  // namespace

c10::Storage MakeArmedStorage(int64_t bytes, c10::Device device,
                              const std::string& error) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device),
      /*allocator=*/nullptr, /*resizable=*/false));
  storage.unsafeGetStorageImpl()
      ->release_data_and_set_meta_custom_data_ptr_error_msg_(
          absl::StrCat(error, kMisuseMark));
  return storage;
}

void SetArmed(c10::StorageImpl& storage, bool armed) {
  storage.*FlagOf(ThrowOnAnyAccess()) = armed;
  storage.*FlagOf(HasMutableAccessCheck()) = armed;
}

GuardedStorage::GuardedStorage(int64_t bytes, c10::Device device,
                               const std::string& error, Guarded kind)
    : storage_(MakeArmedStorage(bytes, device, error)),
      bytes_(bytes),
      kind_(kind) {
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(Pointer(nullptr));
}

c10::DataPtr GuardedStorage::Pointer(void* data) const {
  return c10::DataPtr(data, const_cast<void*>(tag_), KeepTag(kind_),
                      storage_.device());
}

GuardedStorage::~GuardedStorage() {
  tag_ = nullptr;
  Empty();
}

void GuardedStorage::Fill(void* data) {
  c10::StorageImpl& impl = *storage_.unsafeGetStorageImpl();
  SetArmed(impl, false);
  impl.set_data_ptr_noswap(Pointer(data));
  filled_ = true;
}

// nbytes() stays: torch would take a tensor over a smaller storage for
// out-of-bounds, and views taken meanwhile must keep their shapes.
void GuardedStorage::Empty() {
  c10::StorageImpl& impl = *storage_.unsafeGetStorageImpl();
  impl.set_data_ptr_noswap(Pointer(nullptr));
  SetArmed(impl, true);
  filled_ = false;
}

void GuardedStorage::SetTag(const void* tag) {
  tag_ = tag;
  c10::StorageImpl& impl = *storage_.unsafeGetStorageImpl();
  // This accessor checks nothing: the storage may be armed, and stays so.
  void* const data = impl._mutable_data_ptr_no_checks().get();
  impl.set_data_ptr_noswap(Pointer(data));
}

const void* TagOf(const c10::Storage& storage, Guarded kind) {
  return IsGuarded(storage, kind) ? storage.unsafeGetStorageImpl()
                                        ->_mutable_data_ptr_no_checks()
                                        .get_context()
                                  : nullptr;
}

bool IsGuarded(const c10::Storage& storage, Guarded kind) {
  return storage && storage.unsafeGetStorageImpl()
                            ->_mutable_data_ptr_no_checks()
                            .get_deleter() == KeepTag(kind);
}

absl::Status CheckGuardedStorage() {
  GuardedStorage guarded(sizeof(float), c10::Device(c10::kCPU), "self-check");
  c10::StorageImpl& impl = *guarded.storage().unsafeGetStorageImpl();
  const auto read = [&impl] { (void)impl.data(); };
  const auto write = [&impl] { (void)impl.mutable_data(); };
  if (TorchToStatus("read", read).ok()) return SelfCheckFailed("arming, read");
  if (TorchToStatus("write", write).ok()) {
    return SelfCheckFailed("arming, write");
  }
  float value = 0;
  guarded.Fill(&value);
  if (!TorchToStatus("read", read).ok() || impl.data() != &value) {
    return SelfCheckFailed("disarming, read");
  }
  if (!TorchToStatus("write", write).ok() || impl.mutable_data() != &value) {
    return SelfCheckFailed("disarming, write");
  }
  guarded.Empty();
  if (TorchToStatus("read", read).ok() || TorchToStatus("write", write).ok() ||
      impl.nbytes() != sizeof(float)) {
    return SelfCheckFailed("arming again");
  }
  return absl::OkStatus();
}

}  // namespace fsdp::flat_param
