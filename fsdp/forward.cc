#include "fsdp/forward.h"

#include <vector>

#include "base/status_error.h"
#include "fsdp/sharded_model.h"
#include "fsdp/unit_handle.h"

namespace fsdp {

ForwardScope::ForwardScope(const torch::nn::Module& module)
    : handle_(FindUnit(module)) {
  if (handle_ == nullptr) return;
  // The destructor does not run when this throws, and PreForward() has cleaned
  // up then.
  ThrowIfError(handle_->model()->PreForward(handle_->unit()));
}

ForwardScope::~ForwardScope() {
  if (handle_ == nullptr || finished_) return;
  handle_->model()->AbandonForward(handle_->unit());
}

bool ForwardScope::needs_entry() const {
  return handle_->model()->NeedsEntry(handle_->unit());
}

void ForwardScope::AttachEntry(const std::vector<at::Tensor*>& inputs) {
  handle_->model()->AttachEntry(handle_->unit(), inputs);
}

void ForwardScope::Finish(const std::vector<at::Tensor*>& outputs) {
  finished_ = true;
  ThrowIfError(handle_->model()->PostForward(handle_->unit(), outputs));
}

}  // namespace fsdp
