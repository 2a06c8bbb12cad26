// Tells templates of a module's forward(): its signature, which a wrapper
// around the module takes over, and the tensors inside its arguments and
// results.
#ifndef BASE_MODULE_FORWARD_H_
#define BASE_MODULE_FORWARD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Scalar.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"

namespace c10 {
struct IValue;
}  // namespace c10

namespace torch::nn {
class SequentialImpl;
}  // namespace torch::nn

namespace fsdp {

// The type of M's forward, a pointer to a member function.
template <typename M>
struct ForwardOf {
  // The pointer, and whether it is one instance of a template of M's.
  using Type = decltype(&M::forward);
  static constexpr bool kIsTemplate = false;
};
// Sequential's own forward is a template.
template <>
struct ForwardOf<torch::nn::SequentialImpl> {
  // The one that takes and returns a tensor.
  using Type = at::Tensor (torch::nn::SequentialImpl::*)(at::Tensor);
  static constexpr bool kIsTemplate = true;
};

namespace forward_like_internal {

template <typename... Ts>
struct Types {};

template <typename M, typename Arguments, typename = void>
struct IsCallable : std::false_type {};
template <typename M, typename... Args>
struct IsCallable<
    M, Types<Args...>,
    std::void_t<decltype(std::declval<M&>().forward(std::declval<Args>()...))>>
    : std::true_type {};

// Tells whether M's forward can be called without its last argument.
template <typename M, typename Front, typename... Rest>
struct HasDefault : std::false_type {};
template <typename M, typename... Front, typename Last>
struct HasDefault<M, Types<Front...>, Last> : IsCallable<M, Types<Front...>> {};
template <typename M, typename... Front, typename Next, typename After,
          typename... Rest>
struct HasDefault<M, Types<Front...>, Next, After, Rest...>
    : HasDefault<M, Types<Front..., Next>, After, Rest...> {};

template <typename Self, typename Caller, typename Result, typename... Args>
class Exactly {
 public:
  Result forward(Args... args) {
    return Caller::Call(*static_cast<Self*>(this), std::forward<Args>(args)...);
  }
};

template <typename Self, typename Caller>
class WithDefaults {
 public:
  template <typename... Args>
  auto forward(Args&&... args) {
    return Caller::Call(*static_cast<Self*>(this), std::forward<Args>(args)...);
  }
};

}  // namespace forward_like_internal

// A base of `Self` that implements its forward(arguments...) as
// Caller::Call(self, arguments...). The signature is exactly M's, because
// LibTorch looks at it in Sequential and AnyModule. A signature has no default
// arguments, so if M's forward has some, this forward takes whatever M's takes.
template <typename Self, typename M, typename Caller,
          typename Method = typename ForwardOf<M>::Type>
class ForwardLike;

template <typename Self, typename M, typename Caller, typename Owner,
          typename Result, typename... Args>
class ForwardLike<Self, M, Caller, Result (Owner::*)(Args...)>
    : public std::conditional_t<
          !ForwardOf<M>::kIsTemplate &&
              forward_like_internal::HasDefault<
                  M, forward_like_internal::Types<>, Args...>::value,
          forward_like_internal::WithDefaults<Self, Caller>,
          forward_like_internal::Exactly<Self, Caller, Result, Args...>> {};

template <typename Self, typename M, typename Caller, typename Owner,
          typename Result, typename... Args>
class ForwardLike<Self, M, Caller, Result (Owner::*)(Args...) const>
    : public ForwardLike<Self, M, Caller, Result (Owner::*)(Args...)> {};

// Calls visit(at::Tensor&) for each tensor in `value`, in a fixed order. It
// knows tensors, numbers, enums, strings, TorchScript's values (in which it
// sees tensors, tuples, lists and dictionaries), and optionals, pairs, tuples,
// arrays, vectors and maps of what it knows. For a struct of yours define, in
// its namespace,
//   template <typename Visit>
//   void VisitTensors(MyOutput& output, Visit visit) {
//     visit(output.logits);
//   }
template <typename T, typename Visit>
void ForEachTensor(T& value, Visit& visit);

namespace tensor_tree_internal {

// Copies the containers in `value` first, because others may hold the same
// ones.
void VisitScriptValue(c10::IValue& value,
                      absl::FunctionRef<void(at::Tensor&)> visit);

template <typename T>
struct IsTuple : std::false_type {};
template <typename... Ts>
struct IsTuple<std::tuple<Ts...>> : std::true_type {};
template <typename A, typename B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};

template <typename T>
struct IsSequence : std::false_type {};
template <typename T, typename A>
struct IsSequence<std::vector<T, A>> : std::negation<std::is_same<T, bool>> {};
template <typename T, size_t kSize>
struct IsSequence<std::array<T, kSize>> : std::true_type {};

template <typename T>
struct IsMap : std::false_type {};
template <typename... Ts>
struct IsMap<std::map<Ts...>> : std::true_type {};
template <typename... Ts>
struct IsMap<std::unordered_map<Ts...>> : std::true_type {};

template <typename T>
struct HoldsNoTensor
    : std::bool_constant<
          std::is_arithmetic_v<T> || std::is_enum_v<T> ||
          std::is_same_v<T, std::string> || std::is_same_v<T, const char*> ||
          std::is_same_v<T, c10::Scalar> || std::is_same_v<T, c10::Device> ||
          std::is_same_v<T, std::nullopt_t> ||
          std::is_same_v<T, std::vector<bool>>> {};

struct AnyVisit {
  template <typename T>
  void operator()(T&) const {}
};
template <typename T, typename = void>
struct HasVisitTensors : std::false_type {};
template <typename T>
struct HasVisitTensors<
    T, std::void_t<decltype(VisitTensors(std::declval<T&>(), AnyVisit()))>>
    : std::true_type {};

}  // namespace tensor_tree_internal

// Tells whether ForEachTensor() knows T.
template <typename T>
struct HasVisibleTensors
    : std::bool_constant<std::is_base_of_v<at::Tensor, T> ||
                         std::is_same_v<T, c10::IValue> ||
                         tensor_tree_internal::HoldsNoTensor<T>::value ||
                         tensor_tree_internal::HasVisitTensors<T>::value> {};
template <typename T>
struct HasVisibleTensors<const T> : HasVisibleTensors<T> {};
template <typename... Ts>
struct HasVisibleTensors<std::tuple<Ts...>>
    : std::conjunction<HasVisibleTensors<Ts>...> {};
template <typename A, typename B>
struct HasVisibleTensors<std::pair<A, B>>
    : std::conjunction<HasVisibleTensors<A>, HasVisibleTensors<B>> {};
template <typename T>
struct HasVisibleTensors<std::optional<T>> : HasVisibleTensors<T> {};
template <typename T, typename A>
struct HasVisibleTensors<std::vector<T, A>> : HasVisibleTensors<T> {};
template <typename T, size_t kSize>
struct HasVisibleTensors<std::array<T, kSize>> : HasVisibleTensors<T> {};
template <typename K, typename T, typename... Rest>
struct HasVisibleTensors<std::map<K, T, Rest...>> : HasVisibleTensors<T> {};
template <typename K, typename T, typename... Rest>
struct HasVisibleTensors<std::unordered_map<K, T, Rest...>>
    : HasVisibleTensors<T> {};

template <typename T, typename Visit>
void ForEachTensor(T& value, Visit& visit) {
  namespace internal = tensor_tree_internal;
  using Value = std::remove_const_t<T>;
  static_assert(HasVisibleTensors<Value>::value,
                "fsdp cannot see the tensors in this type: define "
                "VisitTensors(T&, visit) in its namespace");
  if constexpr (std::is_base_of_v<at::Tensor, Value>) {
    visit(value);
  } else if constexpr (std::is_same_v<Value, c10::IValue>) {
    internal::VisitScriptValue(value, visit);
  } else if constexpr (internal::HoldsNoTensor<Value>::value) {
    return;
  } else if constexpr (internal::HasVisitTensors<T>::value) {
    auto recurse = [&visit](auto& part) { ForEachTensor(part, visit); };
    VisitTensors(value, recurse);
  } else if constexpr (internal::IsTuple<Value>::value) {
    std::apply([&visit](auto&... parts) { (ForEachTensor(parts, visit), ...); },
               value);
  } else if constexpr (internal::IsOptional<Value>::value) {
    if (value.has_value()) ForEachTensor(*value, visit);
  } else if constexpr (internal::IsSequence<Value>::value) {
    for (auto& part : value) ForEachTensor(part, visit);
  } else if constexpr (internal::IsMap<Value>::value) {
    for (auto& [key, part] : value) ForEachTensor(part, visit);
  }
}

// Returns pointers to the tensors in `value`, which owns them.
template <typename T>
std::vector<at::Tensor*> TensorsOf(T& value) {
  std::vector<at::Tensor*> tensors;
  auto collect = [&tensors](at::Tensor& tensor) { tensors.push_back(&tensor); };
  ForEachTensor(value, collect);
  return tensors;
}

}  // namespace fsdp

#endif  // BASE_MODULE_FORWARD_H_
