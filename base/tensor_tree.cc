#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/module_forward.h"

namespace fsdp::tensor_tree_internal {
namespace {

// `element` must be of a container that the caller has just made.
void VisitElement(const c10::IValue& element,
                  absl::FunctionRef<void(at::Tensor&)> visit) {
  VisitScriptValue(const_cast<c10::IValue&>(element), visit);
}

}  // namespace

void VisitScriptValue(c10::IValue& value,
                      absl::FunctionRef<void(at::Tensor&)> visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTuple()) {
    const c10::ivalue::Tuple& tuple = value.toTupleRef();
    auto copy = c10::ivalue::Tuple::createNamed(
        std::vector<c10::IValue>(tuple.elements().begin(),
                                 tuple.elements().end()),
        tuple.type());
    value = c10::IValue(std::move(copy));
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      VisitElement(element, visit);
    }
  } else if (value.isList()) {
    value = c10::IValue(value.toList().copy());
    for (const c10::IValue& element : value.toListRef()) {
      VisitElement(element, visit);
    }
  } else if (value.isGenericDict()) {
    value = c10::IValue(value.toGenericDict().copy());
    for (const auto& entry : value.toGenericDict()) {
      VisitElement(entry.value(), visit);
    }
  }
}

}  // namespace fsdp::tensor_tree_internal
