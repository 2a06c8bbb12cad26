#include "flat_param/armed_storage.h"

#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/torch_status.h"

namespace fsdp::flat_param {
namespace {

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

}  // namespace fsdp::flat_param
