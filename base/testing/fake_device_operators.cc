// Operators of the fake device: those of the CPU, on tensors of the CPU over
// the same memory.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/testing/fake_device_state.h"
#include "base/testing/fake_device_twins.h"

namespace fsdp::testing::fake_device {
namespace {

using Stack = torch::jit::Stack;

// Returns whether an operator changes what a tensor looks into, not what lies
// there.
bool OnlyMetadata(const c10::FunctionSchema& schema) {
  static const auto* const names = new absl::flat_hash_set<std::string>(
      {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::is_set_to"});
  if (names->contains(schema.name())) return true;
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& result) {
                       const c10::AliasInfo* alias = result.alias_info();
                       return alias != nullptr && !alias->isWrite();
                     });
}

// Returns whether an operator allocates and launches nothing.
bool OnlyAllocates(const std::string& name) {
  static const auto* const names = new absl::flat_hash_set<std::string>(
      {"aten::empty", "aten::empty_like", "aten::empty_strided",
       "aten::new_empty", "aten::new_empty_strided"});
  return names->contains(name);
}

// Returns whether the host has to see values of the device.
bool ReturnsToHost(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& result) {
                       switch (result.type()->kind()) {
                         case c10::TypeKind::NumberType:
                         case c10::TypeKind::IntType:
                         case c10::TypeKind::FloatType:
                         case c10::TypeKind::BoolType:
                           return true;
                         default:
                           return false;
                       }
                     });
}

bool IsMask(const at::Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

bool Shares(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && a.has_storage() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() ==
             b.storage().unsafeGetStorageImpl();
}

// Returns whether `result` lies in the memory of an argument.
bool Holds(const c10::IValue& argument, const at::Tensor& result) {
  if (argument.isTensor()) return Shares(argument.toTensor(), result);
  if (!argument.isTensorList()) return false;
  for (const at::Tensor& each : argument.toTensorVector()) {
    if (Shares(each, result)) return true;
  }
  return false;
}

// Runs an operator once.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op),
        schema_(op.schema()),
        name_(op.schema().name()),
        stack_(stack),
        twins_(op.schema().name()) {}

  void Run() {
    const bool touches = !OnlyMetadata(schema_);
    if (touches && !OnlyAllocates(name_)) {
      State::Get().Count(&FakeDevice::Calls::operators);
    }
    captured_ = touches && State::Get().Captures();
    TakeArguments(touches);
    Stack arguments;
    if (captured_) {
      arguments.assign(
          stack_.end() - static_cast<int64_t>(schema_.arguments().size()),
          stack_.end());
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    twins_.WriteBack();
    if (captured_) AddToCapture(arguments);
    GiveResults(touches);
    if (touches && WaitsForHost()) {
      State::Get().HostWaitForStream(State::CurrentStream(), name_);
    }
  }

 private:
  // Copies a number of the host: a kernel is launched with its value.
  static at::Tensor Number(const at::Tensor& tensor) {
    at::Tensor number = tensor.clone();
    number.unsafeGetTensorImpl()->set_wrapped_number(
        tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return number;
  }

  // Returns the twin of an argument; `touches` says whether its memory is used.
  at::Tensor Take(const at::Tensor& tensor, bool touches, bool writes) {
    at::Tensor twin = twins_.Of(tensor, writes);
    if (captured_ && tensor.defined() && tensor.is_cpu() && !writes) {
      return Number(tensor);
    }
    if (touches && !twin.is_same(tensor) && tensor.numel() > 0) {
      twins_.CheckAccess(tensor, writes);
      State::Get().Access(State::CurrentActor(), tensor, writes, name_);
    }
    return twin;
  }

  void TakeArguments(bool touches) {
    const size_t count = schema_.arguments().size();
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = stack_[stack_.size() - count + i];
      const c10::AliasInfo* alias = schema_.arguments()[i].alias_info();
      const bool writes = alias != nullptr && alias->isWrite();
      if (value.isTensor()) {
        value = Take(value.toTensor(), touches, writes);
      } else if (value.isTensorList()) {
        value = TakeList(value.toTensorList(), touches, writes);
      } else if (value.isOptionalTensorList()) {
        value = TakeIndices(value.toOptionalTensorList());
      } else if (value.isDevice()) {
        value = c10::Device(c10::DeviceType::CPU);
      } else if (value.isStorage()) {
        value = twins_.Of(value.toStorage());
      }
    }
  }

  c10::List<at::Tensor> TakeList(const c10::List<at::Tensor>& list,
                                 bool touches, bool writes) {
    c10::List<at::Tensor> taken;
    for (const at::Tensor& tensor : list.vec()) {
      TORCH_CHECK(!tensor.defined() || tensor.device() == TheDevice(), name_,
                  ": a list has a tensor on ", tensor.device(),
                  ", others are on ", TheDevice());
      taken.push_back(Take(tensor, touches, writes));
    }
    return taken;
  }

  // Takes indices. The places that a mask selects, and an index on the host,
  // depend on values.
  c10::List<std::optional<at::Tensor>> TakeIndices(
      const c10::List<std::optional<at::Tensor>>& list) {
    indexed_ = true;
    c10::List<std::optional<at::Tensor>> taken;
    for (const std::optional<at::Tensor>& index : list.vec()) {
      if (!index.has_value() || !index->defined()) {
        taken.push_back(index);
        continue;
      }
      waits_for_indices_ |= IsMask(*index) || index->is_cpu();
      taken.push_back(index->is_cpu()
                          ? *index
                          : Take(*index, /*touches=*/true, /*writes=*/false));
    }
    return taken;
  }

  at::Tensor Give(const at::Tensor& result, bool touches) {
    if (!result.defined()) return result;
    bool fresh = false;
    at::Tensor given = twins_.OriginalOf(result, fresh);
    if (fresh && touches) {
      State::Get().Access(State::CurrentActor(), given, /*writes=*/true, name_);
      if (captured_) fresh_->push_back(result);
    }
    return given;
  }

  // Replays what the host does: new results go to where the first ones lie. A
  // number on the host keeps its present value.
  void AddToCapture(const Stack& arguments) {
    State::Get().AddRun([op = op_, arguments, fresh = fresh_] {
      Stack stack = arguments;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      auto next = fresh->begin();
      const auto put = [&](const at::Tensor& result) {
        const bool is_new =
            result.defined() && std::none_of(arguments.begin(), arguments.end(),
                                             [&](const c10::IValue& argument) {
                                               return Holds(argument, result);
                                             });
        if (is_new && next != fresh->end()) (next++)->copy_(result);
      };
      for (const c10::IValue& value : stack) {
        if (value.isTensor()) {
          put(value.toTensor());
        } else if (value.isTensorList()) {
          for (const at::Tensor& result : value.toTensorVector()) put(result);
        }
      }
    });
  }

  void GiveResults(bool touches) {
    const size_t count = schema_.returns().size();
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = stack_[stack_.size() - count + i];
      if (value.isTensor()) {
        value = Give(value.toTensor(), touches);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> given;
        for (const at::Tensor& result : value.toTensorVector()) {
          given.push_back(Give(result, touches));
        }
        value = std::move(given);
      }
    }
  }

  bool WaitsForHost() const {
    if (indexed_) return waits_for_indices_;
    return ReturnsToHost(schema_) ||
           op_.hasTag(at::Tag::data_dependent_output) ||
           op_.hasTag(at::Tag::dynamic_output_shape);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  Stack& stack_;
  Twins twins_;
  bool captured_ = false;
  // Twins of the results that are new.
  const std::shared_ptr<std::vector<at::Tensor>> fresh_ =
      std::make_shared<std::vector<at::Tensor>>();
  bool indexed_ = false;
  bool waits_for_indices_ = false;
};

void RunOnCpu(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, *stack).Run();
}

void Access(const at::Tensor& tensor, bool writes, const std::string& what) {
  State& state = State::Get();
  if (tensor.is_cpu()) {
    state.AccessHost(State::CurrentActor(), tensor, writes, what);
  } else {
    state.Access(State::CurrentActor(), tensor, writes, what);
  }
}

// LibTorch's copy_() ends here if one of the tensors is on this device.
at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to,
                    bool non_blocking) {
  if (to.numel() == 0) return to;
  State::Get().Count(&FakeDevice::Calls::operators);
  const bool on_device = !from.is_cpu() && !to.is_cpu();
  const std::string what = on_device     ? "aten::copy_"
                           : to.is_cpu() ? "copy to the host"
                                         : "copy from the host";
  Twins twins(what);
  const at::Tensor source = from.is_cpu() ? from : twins.Of(from, false);
  const at::Tensor target = to.is_cpu() ? to : twins.Of(to, true);
  Twins::CheckAccess(from, /*writes=*/false);
  Twins::CheckAccess(to, /*writes=*/true);
  Access(from, /*writes=*/false, what);
  Access(to, /*writes=*/true, what);
  State& state = State::Get();
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(source);
  }
  if (state.Captures()) {
    state.AddRun([target, source] { target.copy_(source); });
  }
  if (on_device) return to;
  const at::Tensor& on_host = from.is_cpu() ? from : to;
  if (!non_blocking) {
    state.HostWaitForStream(State::CurrentStream(), what);
  } else if (!state.IsPinned(on_host.const_data_ptr())) {
    state.HostMayWait(what);
  }
  return to;
}

void RecordStream(at::Tensor& tensor, c10::Stream stream) {
  State::Get().RecordOnStream(tensor.storage().data(), stream.id());
}

// Returns the operators that LibTorch composes of others for all devices but
// the CPU: they are to have the CPU's bits, too.
std::vector<c10::OperatorName> ComposedElsewhere() {
  std::vector<c10::OperatorName> names;
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name :
       dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || op->operator_name().getNamespace() != "aten") {
      continue;
    }
    for (const c10::DispatchKey key :
         {c10::DispatchKey::CompositeExplicitAutograd,
          c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
          c10::DispatchKey::CompositeImplicitAutograd}) {
      if (!op->hasKernelForDispatchKey(key)) continue;
      names.push_back(name);
      break;
    }
  }
  return names;
}

}  // namespace

void RegisterOperators() {
  constexpr auto kKey = c10::DispatchKey::PrivateUse1;
  static auto* const all =
      new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnCpu>());
  static auto* const aten = new torch::Library(torch::Library::IMPL, "aten",
                                               kKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : ComposedElsewhere()) {
    const std::string full =
        name.overload_name.empty()
            ? name.name
            : absl::StrCat(name.name, ".", name.overload_name);
    aten->impl(full.c_str(),
               torch::CppFunction::makeFromBoxedFunction<&RunOnCpu>());
  }
  aten->impl("_copy_from", &CopyFrom);
  aten->impl("record_stream", &RecordStream);
}

}  // namespace fsdp::testing::fake_device
