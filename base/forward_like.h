// Gives a wrapper around a module a forward() with the wrapped module's own
// signature.
#ifndef BASE_FORWARD_LIKE_H_
#define BASE_FORWARD_LIKE_H_

#include <ATen/core/Tensor.h>

#include <utility>

namespace torch::nn {
class SequentialImpl;
}  // namespace torch::nn

namespace fsdp {

// The type of M's forward, a pointer to a member function.
template <typename M>
struct ForwardOf {
  using Type = decltype(&M::forward);
};
// Sequential's own forward is a template.
template <>
struct ForwardOf<torch::nn::SequentialImpl> {
  using Type = at::Tensor (torch::nn::SequentialImpl::*)(at::Tensor);
};

// Base of `Self`, whose forward(arguments...) it implements as
// Caller::Call(self, arguments...). A variadic forward would not do where
// LibTorch looks at the signature: in Sequential and AnyModule.
template <typename Self, typename M, typename Caller,
          typename Method = typename ForwardOf<M>::Type>
class ForwardLike;

template <typename Self, typename M, typename Caller, typename Owner,
          typename Result, typename... Args>
class ForwardLike<Self, M, Caller, Result (Owner::*)(Args...)> {
 public:
  Result forward(Args... args) {
    return Caller::Call(*static_cast<Self*>(this), std::forward<Args>(args)...);
  }
};

template <typename Self, typename M, typename Caller, typename Owner,
          typename Result, typename... Args>
class ForwardLike<Self, M, Caller, Result (Owner::*)(Args...) const>
    : public ForwardLike<Self, M, Caller, Result (Owner::*)(Args...)> {};

}  // namespace fsdp

#endif  // BASE_FORWARD_LIKE_H_
