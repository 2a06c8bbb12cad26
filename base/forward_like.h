// Gives a wrapper around a module a forward() with the wrapped module's own
// signature.
#ifndef BASE_FORWARD_LIKE_H_
#define BASE_FORWARD_LIKE_H_

#include <ATen/core/Tensor.h>

#include <type_traits>
#include <utility>

namespace torch::nn {
class SequentialImpl;
}  // namespace torch::nn

namespace fsdp {

// The type of M's forward, a pointer to a member function.
template <typename M>
struct ForwardOf {
  using Type = decltype(&M::forward);
  static constexpr bool kIsTemplate = false;
};
// Sequential's own forward is a template.
template <>
struct ForwardOf<torch::nn::SequentialImpl> {
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

}  // namespace fsdp

#endif  // BASE_FORWARD_LIKE_H_
