// Messages over any c10d backend.
#ifndef COMM_GLOO_C10D_TRANSPORT_H_
#define COMM_GLOO_C10D_TRANSPORT_H_

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/gloo/message_transport.h"
#include "comm/rank_names.h"

namespace fsdp::comm {

// Over `backend`, which must have send() and recv() for CPU tensors and no
// other user; `names` are those of its ranks. `close` breaks its connections;
// empty where backend->abort() does.
std::unique_ptr<MessageTransport> C10dTransport(
    c10::intrusive_ptr<c10d::Backend> backend, RankNames names,
    std::function<void()> close = nullptr);

}  // namespace fsdp::comm

#endif  // COMM_GLOO_C10D_TRANSPORT_H_
