#include "base/testing/fake_device_state.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::testing::fake_device {
namespace {

// As with CUDA, streams from the pool come back in turn.
constexpr int64_t kPoolSize = 32;

// A strided tensor of more ranges counts as one range.
constexpr size_t kMaxRanges = 4096;

thread_local int64_t current_stream = 0;

uintptr_t Address(const void* data) {
  return reinterpret_cast<uintptr_t>(data);
}

// Returns the storage's address without the check that armed storages make.
uintptr_t AddressOf(const c10::Storage& storage) {
  return Address(
      storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
}

}  // namespace

std::vector<Range> RangesOf(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  const auto size = static_cast<int64_t>(tensor.element_size());
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size, ascending
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != 0) {
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t run = 1;  // elements without a gap
  size_t dim = 0;
  for (; dim < dims.size() && dims[dim].first == run; ++dim) {
    run *= dims[dim].second;
  }
  const uintptr_t base =
      AddressOf(tensor.storage()) + tensor.storage_offset() * size;
  std::vector<Range> ranges = {{base, base + run * size}};
  for (; dim < dims.size(); ++dim) {
    const auto [stride, count] = dims[dim];
    if (ranges.size() * count > kMaxRanges) {
      ranges = {{ranges.front().begin,
                 ranges.back().end + (count - 1) * stride * size}};
      continue;
    }
    const size_t inner = ranges.size();
    for (int64_t i = 1; i < count; ++i) {
      for (size_t j = 0; j < inner; ++j) {
        ranges.push_back({ranges[j].begin + i * stride * size,
                          ranges[j].end + i * stride * size});
      }
    }
  }
  return ranges;
}

State& State::Get() {
  static State* const state = new State;
  return *state;
}

int64_t State::CurrentStream() { return current_stream; }
int64_t State::ExchangeStream(int64_t stream) {
  return std::exchange(current_stream, stream);
}

c10::DataPtr State::Adopt(c10::DataPtr memory, size_t bytes) {
  void* const data = memory.get();
  auto* const allocation = new Allocation;
  allocation->memory = std::move(memory);
  allocation->range = {Address(data), Address(data) + bytes};
  allocation->actor = CurrentActor();
  if (bytes > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (capture_ != nullptr && capture_->Has(CurrentStream())) {
      capture_->Allocate(CurrentStream(), allocation->range, "allocate");
      allocation->owner = capture_;
      allocation->is_captured = true;
      allocations_[allocation->range.begin] = allocation;
      return c10::DataPtr(data, allocation, &Free, TheDevice());
    }
    order_.Forget(allocation->range);
    order_.Access(allocation->actor, {allocation->range}, /*writes=*/true,
                  "allocate");
    allocations_[allocation->range.begin] = allocation;
    ++calls_.allocations;
    in_use_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, in_use_);
  }
  return c10::DataPtr(data, allocation, &Free, TheDevice());
}

void State::Free(void* pointer) {
  auto* const allocation = static_cast<Allocation*>(pointer);
  const Range range = allocation->range;
  if (range.end > range.begin) {
    State& state = Get();
    const std::lock_guard<std::mutex> lock(state.mutex_);
    if (state.FreeCaptured(*allocation)) {
      delete allocation;
      return;
    }
    std::vector<int> spared;
    spared.reserve(allocation->spared.size());
    for (int64_t stream : allocation->spared) {
      spared.push_back(HappensBefore::ActorOf(stream));
    }
    state.order_.Free(allocation->actor, range, spared, "free");
    state.allocations_.erase(range.begin);
    state.in_use_ -= static_cast<int64_t>(range.end - range.begin);
  }
  delete allocation;
}

void State::RecordOnStream(const void* data, int64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = allocations_.upper_bound(Address(data));
  if (next == allocations_.begin()) return;
  Allocation& allocation = *std::prev(next)->second;
  if (Address(data) < allocation.range.end) {
    allocation.spared.push_back(stream);
  }
}

void State::Access(int actor, const at::Tensor& tensor, bool writes,
                   absl::string_view what) {
  const std::vector<Range> ranges = RangesOf(tensor);
  const std::lock_guard<std::mutex> lock(mutex_);
  AccessLocked(actor, ranges, writes, what);
}

void State::AccessLocked(int actor, const std::vector<Range>& ranges,
                         bool writes, absl::string_view what) {
  if (actor != HappensBefore::kHost) {
    const int64_t stream = actor - HappensBefore::ActorOf(0);
    if (Capture* const capture = CaptureOf(stream, what)) {
      capture->Access(stream, ranges, writes, std::string(what));
      return;
    }
  }
  order_.Access(actor, ranges, writes, std::string(what));
}

void State::ForgetHostMemoryThatWent() {
  const auto went = [&](const HostMemory& memory) {
    if (!memory.storage.expired()) return false;
    order_.Forget(memory.range);
    return true;
  };
  host_memory_.erase(
      std::remove_if(host_memory_.begin(), host_memory_.end(), went),
      host_memory_.end());
}

void State::AccessHost(int actor, const at::Tensor& tensor, bool writes,
                       absl::string_view what) {
  const std::vector<Range> ranges = RangesOf(tensor);
  const c10::Storage& storage = tensor.storage();
  const uintptr_t begin = AddressOf(storage);
  const bool owned =
      storage.unsafeGetStorageImpl()
          ->_mutable_data_ptr_no_checks()
          .get_deleter() == c10::GetCPUAllocator()->raw_deleter();
  const std::lock_guard<std::mutex> lock(mutex_);
  ForgetHostMemoryThatWent();
  if (owned) {
    host_memory_.push_back(
        {storage.getWeakStorageImpl(), {begin, begin + storage.nbytes()}});
  }
  AccessLocked(actor, ranges, writes, what);
}

c10::DataPtr State::AllocatePinned(size_t bytes) {
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
  void* const data = memory.get();
  auto* const pinned = new Allocation;
  pinned->memory = std::move(memory);
  pinned->range = {Address(data), Address(data) + bytes};
  Pin(data, static_cast<int64_t>(bytes));
  return c10::DataPtr(data, pinned, &FreePinned,
                      c10::Device(c10::DeviceType::CPU));
}

void State::FreePinned(void* pointer) {
  const auto* const pinned = static_cast<Allocation*>(pointer);
  if (pinned->range.end > pinned->range.begin) {
    State& state = Get();
    const std::lock_guard<std::mutex> lock(state.mutex_);
    state.order_.Forget(pinned->range);
    state.pinned_.erase(pinned->range.begin);
  }
  delete pinned;
}

void State::Pin(void* memory, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (bytes > 0)
    pinned_[Address(memory)] = {Address(memory), Address(memory) + bytes};
}

void State::Unpin(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto pinned = pinned_.find(Address(memory));
  if (pinned == pinned_.end()) return;
  order_.Access(HappensBefore::kHost, {pinned->second}, /*writes=*/true,
                "unpinning");
  order_.Forget(pinned->second);
  pinned_.erase(pinned);
}

bool State::IsPinned(const void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = pinned_.upper_bound(Address(data));
  return next != pinned_.begin() && Address(data) < std::prev(next)->second.end;
}

Point State::Record(int64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Point point;
  if (capture_ != nullptr && capture_->Has(stream)) {
    point.is_captured = true;
    point.capture = capture_;
    point.event = capture_->Record(stream);
  } else {
    point.clock = order_.Record(HappensBefore::ActorOf(stream));
  }
  return point;
}

void State::Block(int64_t stream, const Point& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (event.is_captured) {
    if (capture_ == nullptr || event.capture.lock() != capture_) {
      Refuse("a wait for an event of a capture that is over");
    }
    capture_->Wait(stream, event.event);
    return;
  }
  if (capture_ != nullptr && capture_->Has(stream)) {
    Refuse("a wait for an event of before the capture");
  }
  order_.Wait(HappensBefore::ActorOf(stream), event.clock);
}

void State::Learn(const Point& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  CheckHostMayWait(event, "a question whether an event is reached");
  order_.Wait(HappensBefore::kHost, event.clock);
}

void State::HostWait(const Point& event, absl::string_view what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  CheckHostMayWait(event, what);
  order_.Wait(HappensBefore::kHost, event.clock);
  host_waits_.emplace_back(what);
}

void State::HostWaitForStream(int64_t stream, absl::string_view what) {
  HostWait(Record(stream), what);
}

void State::HostMayWait(absl::string_view what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capture_ != nullptr) Refuse(what);
  host_waits_.emplace_back(what);
}

void State::HostWaitForAll(absl::string_view what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capture_ != nullptr) Refuse(what);
  order_.WaitForAll();
  host_waits_.emplace_back(what);
}

void State::Refuse(absl::string_view what) {
  const std::string text = absl::StrCat("fake device: ", what,
                                        " while a graph is captured, "
                                        "or of one that was");
  if (capture_ != nullptr) capture_->Invalidate(text);
  TORCH_CHECK(false, text);
}

// Refuses a wait of the host. Other threads may wait for what is not captured.
void State::CheckHostMayWait(const Point& event, absl::string_view what) {
  if (event.is_captured ||
      (capture_ != nullptr && capture_->IsOfThisThread())) {
    Refuse(what);
  }
}

Capture* State::CaptureOf(int64_t stream, absl::string_view what) {
  if (capture_ == nullptr) return nullptr;
  if (!capture_->Has(stream)) {
    Refuse(
        absl::StrCat(what, " on stream ", stream, ", which is not captured,"));
  }
  return capture_.get();
}

void State::RefuseInCapture(absl::string_view what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capture_ != nullptr) Refuse(what);
}

bool State::BeginCapture(std::shared_ptr<Capture> capture) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capture_ != nullptr) return false;
  captures_.push_back(capture);
  capture_ = std::move(capture);
  return true;
}

std::string State::EndCapture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string reason = capture_->End(CurrentStream());
  capture_.reset();
  return reason;
}

bool State::Captures() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return capture_ != nullptr && capture_->Has(CurrentStream());
}

void State::AddRun(std::function<void()> run) {
  const std::lock_guard<std::mutex> lock(mutex_);
  capture_->Run(CurrentStream(), std::move(run));
}

std::string State::Replay(Capture& capture,
                          const std::map<int64_t, int>& actors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (capture_ != nullptr) return "a capture is under way";
  if (capture.freed().empty()) {
    capture.Replay(order_, CurrentActor(), actors);
  }
  return capture.freed();
}

// Returns whether that was all there is to do.
bool State::FreeCaptured(Allocation& allocation) {
  for (const std::weak_ptr<Capture>& each : captures_) {
    const std::shared_ptr<Capture> capture = each.lock();
    if (capture != nullptr) {
      capture->NoteFreed(allocation.range, "free");
    }
  }
  if (!allocation.is_captured) return false;
  allocations_.erase(allocation.range.begin);
  const std::shared_ptr<Capture> owner = allocation.owner.lock();
  if (owner == nullptr) return true;
  if (owner == capture_) {
    owner->Free(allocation.actor - HappensBefore::ActorOf(0), allocation.range,
                allocation.spared, "free");
  }
  owner->Keep(std::move(allocation.memory));
  return true;
}

bool State::Stalled() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stalls_ > 0;
}

void State::Stall(int by) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stalls_ += by;
}

// Stream 0 is the default; then come both pools, then those made anew.
int64_t State::NewStream(bool from_pool, bool high_priority) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!from_pool) return 1 + 2 * kPoolSize + streams_++;
  const int64_t place = pooled_[high_priority ? 1 : 0]++ % kPoolSize;
  return 1 + place + (high_priority ? kPoolSize : 0);
}

void State::Count(int64_t FakeDevice::Calls::*what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++(calls_.*what);
}

}  // namespace fsdp::testing::fake_device

namespace fsdp::testing {

using fake_device::State;

void FakeDevice::Register() {
  static const bool done = [] {
    fake_device::RegisterRuntime();
    fake_device::RegisterOperators();
    return true;
  }();
  (void)done;
}

c10::Device FakeDevice::device() { return fake_device::TheDevice(); }

void FakeDevice::Move(const std::vector<at::Tensor>& tensors) {
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor moved = tensor.detach().to(device());
    tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
  }
}

void FakeDevice::Reset() {
  State& state = State::Get();
  const std::lock_guard<std::mutex> lock(state.mutex_);
  state.order_.Reset();
  state.host_memory_.clear();
  state.host_waits_.clear();
  state.calls_ = {};
  state.peak_ = state.in_use_;
}

std::vector<std::string> FakeDevice::Races() {
  return State::Get().Locked([](State& state) { return state.order_.races(); });
}
std::vector<std::string> FakeDevice::HostWaits() {
  return State::Get().Locked([](State& state) { return state.host_waits_; });
}
FakeDevice::Calls FakeDevice::calls() {
  return State::Get().Locked([](State& state) { return state.calls_; });
}
int64_t FakeDevice::bytes_in_use() {
  return State::Get().Locked([](State& state) { return state.in_use_; });
}
int64_t FakeDevice::peak_bytes() {
  return State::Get().Locked([](State& state) { return state.peak_; });
}

void FakeDevice::Pin(void* memory, int64_t bytes) {
  State::Get().Pin(memory, bytes);
}

void FakeDevice::Unpin(void* memory) { State::Get().Unpin(memory); }

void FakeDevice::Touch(const at::Tensor& tensor, bool writes,
                       absl::string_view what) {
  State::Get().RefuseInCapture(what);
  State::Get().Access(State::CurrentActor(), tensor, writes, what);
}

void FakeDevice::HostRead(const at::Tensor& tensor, absl::string_view what) {
  State::Get().Access(HappensBefore::kHost, tensor, /*writes=*/false, what);
}

void FakeDevice::HostWrite(const at::Tensor& tensor, absl::string_view what) {
  State::Get().Access(HappensBefore::kHost, tensor, /*writes=*/true, what);
}

FakeDevice::Stall::Stall() { State::Get().Stall(1); }
FakeDevice::Stall::~Stall() { State::Get().Stall(-1); }

}  // namespace fsdp::testing
