// How nodes of autograd are held: by std::shared_ptr in LibTorch up to 2.12,
// by c10::intrusive_ptr from 2.13 on.
#ifndef BASE_AUTOGRAD_NODE_H_
#define BASE_AUTOGRAD_NODE_H_

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <utility>

namespace fsdp {
namespace autograd_node_internal {

using ::torch::autograd::Node;

// For what an Edge has.
template <typename Pointer>
struct Pointers;

template <>
struct Pointers<std::shared_ptr<Node>> {
  template <typename T>
  using To = std::shared_ptr<T>;
  using Weak = std::weak_ptr<Node>;

  template <typename T, typename... Arguments>
  static std::shared_ptr<T> Make(Arguments&&... arguments) {
    // It destroys a long graph without recursion, and is found by its argument
    // since later releases do not have it.
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...),
                              [](T* node) { deleteNode(node); });
  }
};

template <>
struct Pointers<c10::intrusive_ptr<Node>> {
  template <typename T>
  using To = c10::intrusive_ptr<T>;
  using Weak = c10::weak_intrusive_ptr<Node>;

  template <typename T, typename... Arguments>
  static c10::intrusive_ptr<T> Make(Arguments&&... arguments) {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
};

using Chosen = Pointers<decltype(torch::autograd::Edge::function)>;

}  // namespace autograd_node_internal

template <typename T>
using NodePtrTo = autograd_node_internal::Chosen::To<T>;
using NodePtr = NodePtrTo<torch::autograd::Node>;
using WeakNodePtr = autograd_node_internal::Chosen::Weak;

// Makes a node of type T, which derives from torch::autograd::Node.
template <typename T, typename... Arguments>
NodePtrTo<T> MakeNode(Arguments&&... arguments) {
  return autograd_node_internal::Chosen::Make<T>(
      std::forward<Arguments>(arguments)...);
}

}  // namespace fsdp

#endif  // BASE_AUTOGRAD_NODE_H_
