// Captures of the fake device, and its graphs.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/fake_device.h"
#include "base/testing/fake_device_state.h"

namespace fsdp::testing::fake_device {
namespace {

bool Overlap(const HappensBefore::Range& a, const HappensBefore::Range& b) {
  return a.begin < b.end && b.begin < a.end;
}

at::Generator Generator() { return at::detail::getDefaultCPUGenerator(); }

// Ranges are numbers, so that those of different allocations compare.
char* Memory(uintptr_t address) {
  return reinterpret_cast<char*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

Capture::Capture(int64_t origin)
    : origin_(origin), generator_(Generator().get_state()) {
  Join(origin);
}

Capture::~Capture() = default;

void Capture::Invalidate(const std::string& reason) {
  if (invalid_.empty()) invalid_ = reason;
}

void Capture::Join(int64_t stream) {
  if (!streams_.emplace(stream, 0).second) return;
  stream_list_.push_back(stream);
}

// Notes that the stream has been given something.
void Capture::Note(int64_t stream) {
  const int actor = HappensBefore::ActorOf(stream);
  streams_[stream] = order_.Record(actor)[actor];
}

bool Capture::IsOwn(const Range& range) const {
  auto next = own_.upper_bound(range.begin);
  return next != own_.begin() && range.begin < std::prev(next)->second;
}

void Capture::Allocate(int64_t stream, Range range, const std::string& what) {
  own_[range.begin] = range.end;
  nodes_.push_back({Node::Kind::kAllocate, stream, {range}, true, what});
}

void Capture::Free(int64_t stream, Range range,
                   const std::vector<int64_t>& spared,
                   const std::string& what) {
  nodes_.push_back({Node::Kind::kFree, stream, {range}, true, what, spared});
}

void Capture::Access(int64_t stream, const std::vector<Range>& ranges,
                     bool writes, const std::string& what) {
  Note(stream);
  nodes_.push_back({Node::Kind::kAccess, stream, ranges, writes, what});
  for (const Range& range : ranges) {
    if (IsOwn(range)) continue;
    others_.push_back(range);
    if (!writes) continue;
    const char* const begin = Memory(range.begin);
    saved_.push_back(
        {range.begin,
         std::vector<char>(begin, begin + (range.end - range.begin))});
  }
}

void Capture::Run(int64_t stream, std::function<void()> run) {
  Node node{Node::Kind::kRun, stream};
  node.run = std::move(run);
  nodes_.push_back(std::move(node));
}

int Capture::Record(int64_t stream) {
  Node node{Node::Kind::kRecord, stream};
  node.event = static_cast<int>(events_.size());
  nodes_.push_back(node);
  events_.push_back(order_.Record(HappensBefore::ActorOf(stream)));
  return node.event;
}

void Capture::Wait(int64_t stream, int event) {
  Join(stream);
  Node node{Node::Kind::kWait, stream};
  node.event = event;
  nodes_.push_back(node);
  order_.Wait(HappensBefore::ActorOf(stream), events_[event]);
}

std::string Capture::End(int64_t stream) {
  for (auto saved = saved_.rbegin(); saved != saved_.rend(); ++saved) {
    std::memcpy(Memory(saved->begin), saved->bytes.data(), saved->bytes.size());
  }
  saved_.clear();
  Generator().set_state(generator_);
  for (const auto& [begin, end] : own_) {
    std::memset(Memory(begin), 0xff, end - begin);
  }
  if (!IsOfThisThread() || stream != origin_) {
    Invalidate("it ends on another thread or stream than it has begun on");
  }
  const HappensBefore::Clock joined =
      order_.Record(HappensBefore::ActorOf(origin_));
  for (const auto& [each, last] : streams_) {
    const auto actor = static_cast<size_t>(HappensBefore::ActorOf(each));
    if (last > 0 && (actor >= joined.size() || joined[actor] < last)) {
      Invalidate(absl::StrCat("the first stream does not wait for stream ",
                              each, " at last"));
    }
  }
  return invalid_;
}

void Capture::NoteFreed(Range range, const std::string& what) {
  const auto is_gone = [&](const Saved& saved) {
    return Overlap({saved.begin, saved.begin + saved.bytes.size()}, range);
  };
  saved_.erase(std::remove_if(saved_.begin(), saved_.end(), is_gone),
               saved_.end());
  if (!freed_.empty()) return;
  const bool used =
      std::any_of(others_.begin(), others_.end(),
                  [&](const Range& other) { return Overlap(other, range); });
  if (used) {
    freed_ =
        absl::StrCat(range.end - range.begin,
                     " bytes of others that were recorded are gone: ", what);
  }
}

void Capture::Replay(HappensBefore& order, int caller,
                     const std::map<int64_t, int>& actors) {
  order.Wait(actors.at(origin_), order.Record(caller));
  std::vector<HappensBefore::Clock> events(events_.size());
  for (const Node& node : nodes_) {
    const int actor = actors.at(node.stream);
    switch (node.kind) {
      case Node::Kind::kRun:
        node.run();
        break;
      case Node::Kind::kAllocate:
      case Node::Kind::kAccess:
        order.Access(actor, node.ranges, node.writes,
                     absl::StrCat(node.what, " (replayed)"));
        break;
      case Node::Kind::kFree: {
        std::vector<int> spared;
        for (int64_t stream : node.spared) {
          const auto found = actors.find(stream);
          if (found != actors.end()) spared.push_back(found->second);
        }
        order.Free(actor, node.ranges.front(), spared,
                   absl::StrCat(node.what, " (replayed)"));
        break;
      }
      case Node::Kind::kRecord:
        events[node.event] = order.Record(actor);
        break;
      case Node::Kind::kWait:
        order.Wait(actor, events[node.event]);
        break;
    }
  }
  order.Wait(caller, order.Record(actors.at(origin_)));
}

std::string Capture::Describe(const Range& range) const {
  auto next = own_.upper_bound(range.begin);
  if (!IsOwn(range)) {
    return absl::StrCat(absl::Hex(range.begin), "+", range.end - range.begin);
  }
  const uintptr_t begin = std::prev(next)->first;
  int64_t place = 0;
  for (const Node& node : nodes_) {
    if (node.kind != Node::Kind::kAllocate) continue;
    if (node.ranges.front().begin == begin) break;
    ++place;
  }
  return absl::StrCat("own ", place, " at ", range.begin - begin, "+",
                      range.end - range.begin);
}

std::vector<std::string> Capture::Operations() const {
  std::vector<std::string> lines;
  for (const Node& node : nodes_) {
    const auto place =
        std::find(stream_list_.begin(), stream_list_.end(), node.stream) -
        stream_list_.begin();
    std::string line = absl::StrCat("stream ", place, ": ");
    switch (node.kind) {
      case Node::Kind::kRun:
        continue;
      case Node::Kind::kRecord:
        absl::StrAppend(&line, "event ", node.event);
        break;
      case Node::Kind::kWait:
        absl::StrAppend(&line, "wait for event ", node.event);
        break;
      default:
        absl::StrAppend(&line, node.what, node.writes ? " writes" : " reads");
        for (const Range& range : node.ranges) {
          absl::StrAppend(&line, " ", Describe(range));
        }
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace fsdp::testing::fake_device

namespace fsdp::testing {

using fake_device::Capture;
using fake_device::State;

absl::StatusOr<std::unique_ptr<DeviceGraph>> FakeDeviceGraph::Make(
    c10::Device device) {
  if (device != fake_device::TheDevice()) {
    return absl::InvalidArgumentError(
        absl::StrCat(device.str(), " is not the fake device"));
  }
  return std::make_unique<FakeDeviceGraph>();
}

FakeDeviceGraph::FakeDeviceGraph() = default;
FakeDeviceGraph::~FakeDeviceGraph() { FakeDeviceGraph::Reset(); }

absl::Status FakeDeviceGraph::BeginCapture() {
  const int64_t stream = State::CurrentStream();
  if (capture_ != nullptr) {
    return absl::FailedPreconditionError("a graph holds a capture already");
  }
  if (stream == 0) {
    return absl::FailedPreconditionError(
        "the default stream cannot be captured");
  }
  capture_ = std::make_shared<Capture>(stream);
  if (State::Get().BeginCapture(capture_)) return absl::OkStatus();
  capture_.reset();
  return absl::FailedPreconditionError("another capture is under way");
}

absl::Status FakeDeviceGraph::EndCapture() {
  if (capture_ == nullptr || is_over_) {
    return absl::FailedPreconditionError("no capture is under way");
  }
  const std::string reason = State::Get().EndCapture();
  is_over_ = true;
  if (!reason.empty()) {
    Reset();
    return absl::FailedPreconditionError(
        absl::StrCat("the capture is invalid: ", reason));
  }
  for (int64_t stream : capture_->streams()) {
    actors_[stream] = HappensBefore::ActorOf(
        State::Get().NewStream(/*from_pool=*/false, /*high_priority=*/false));
  }
  return absl::OkStatus();
}

absl::Status FakeDeviceGraph::Replay() {
  if (!is_over_) return absl::FailedPreconditionError("nothing was captured");
  const c10::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::string reason = State::Get().Replay(*capture_, actors_);
  if (reason.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the graph cannot be replayed: ", reason));
}

void FakeDeviceGraph::Reset() {
  if (capture_ != nullptr && !is_over_) State::Get().EndCapture();
  capture_.reset();
  actors_.clear();
  is_over_ = false;
}

std::vector<std::string> FakeDeviceGraph::Operations() const {
  return is_over_ ? capture_->Operations() : std::vector<std::string>();
}

}  // namespace fsdp::testing
