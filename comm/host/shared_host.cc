#include "comm/host/shared_host.h"

#include <ATen/ops/from_blob.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace fsdp::comm {

// Images are compared as bytes.
static_assert(sizeof(CallImage) == 8 + 8 + 16 + 32 + 192,
              "no padding between the members");

CallImage ImageOf(const Call& call) {
  CallImage image;
  image.collective = static_cast<int64_t>(call.collective);
  image.count = call.count;
  image.dtype.Set(call.dtype);
  image.detail.Set(call.detail);
  image.label.Set(call.label);
  return image;
}

Call CallOf(const CallImage& image) {
  return {static_cast<Collective>(image.collective), image.label.ToString(),
          image.dtype.ToString(), image.count, image.detail.ToString()};
}

bool operator==(const CallImage& a, const CallImage& b) {
  return std::memcmp(&a, &b, sizeof(CallImage)) == 0;
}

namespace {

std::pair<uint64_t, uint64_t> IdentityOf(const SegmentAddress& address) {
  return {address.device, address.inode};
}

// The number of looks at the word per look at the clock.
constexpr int kLooksPerTurn = 64;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void FutexWait(std::atomic<uint32_t>* word, uint32_t value,
               absl::Duration timeout) {
  const timespec relative = absl::ToTimespec(timeout);
  // Every error is a reason to look again: a change, a signal, the time.
  syscall(SYS_futex, word, FUTEX_WAIT, value, &relative, nullptr, 0);
}

// In this time the kernel wakes a thread: longer spinning is a waste.
constexpr absl::Duration kSpin = absl::Microseconds(100);

int NumCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

std::shared_ptr<SharedHeap> MakeHeap(
    const std::shared_ptr<SharedSegment>& mailbox) {
  return std::make_shared<SharedHeap>([mailbox] {
    auto* own = reinterpret_cast<SharedMailbox*>(mailbox->data());
    own->frees.fetch_add(1, std::memory_order_release);
  });
}

}  // namespace

SharedHeap::SharedHeap(std::function<void()> on_free)
    : on_free_(std::move(on_free)) {}

at::Tensor SharedHeap::MakeTensor(std::shared_ptr<SharedSegment> segment,
                                  int64_t offset, int64_t bytes) {
  char* data = segment->data() + offset;
  {
    absl::MutexLock lock(&mutex_);
    tensors_[data] = {bytes, offset, segment};
    own_[IdentityOf(segment->address())] = segment;
  }
  const auto free = [heap = shared_from_this(), segment](void* freed) mutable {
    {
      absl::MutexLock lock(&heap->mutex_);
      heap->tensors_.erase(static_cast<const char*>(freed));
      heap->own_.erase(IdentityOf(segment->address()));
    }
    segment.reset();
    heap->on_free_();
  };
  return at::from_blob(data, {bytes}, free,
                       at::TensorOptions().dtype(at::kByte));
}

SharedPlace SharedHeap::Find(const void* data, int64_t bytes) const {
  const char* begin = static_cast<const char*>(data);
  absl::MutexLock lock(&mutex_);
  auto after = tensors_.upper_bound(begin);
  if (after == tensors_.begin()) return {};
  const auto& [base, range] = *std::prev(after);
  const std::shared_ptr<SharedSegment> segment = range.segment.lock();
  if (segment == nullptr || begin + bytes > base + range.bytes) return {};
  return {segment->address(), range.offset + (begin - base)};
}

absl::StatusOr<SharedHeap::Mapping> SharedHeap::Resolve(
    int owner, const SharedPlace& place, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto identity = IdentityOf(place.segment);
  std::shared_ptr<SharedSegment> segment;
  const auto own = own_.find(identity);
  if (own != own_.end()) segment = own->second.lock();
  if (segment == nullptr) {
    std::shared_ptr<SharedSegment>& mapped = mapped_[owner][identity];
    if (mapped == nullptr) {
      FSDP_ASSIGN_OR_RETURN(mapped, SharedSegment::Open(place.segment));
      mapped->Seal();  // descriptors are scarce
    }
    segment = mapped;
  }
  if (place.offset < 0 || bytes < 0 || bytes > segment->bytes() ||
      place.offset > segment->bytes() - bytes) {
    return absl::UnavailableError(
        absl::StrCat(bytes, " bytes at ", place.offset, " of a segment of ",
                     segment->bytes()));
  }
  char* data = segment->data() + place.offset;
  return Mapping{std::move(segment), data};
}

void SharedHeap::Forget(int owner) {
  absl::MutexLock lock(&mutex_);
  mapped_.erase(owner);
}

void Doorbell::Ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &count_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::Await(uint32_t seen, absl::Duration spin, absl::Time until) {
  absl::Time now = absl::Now();
  const absl::Time end = std::min(now + spin, until);
  while (now < end) {
    for (int i = 0; i < kLooksPerTurn; ++i) {
      if (Count() != seen) return;
      Pause();
    }
    now = absl::Now();
  }
  if (now >= until) return;
  // This store precedes the kernel's look at the word, as Ring()'s store
  // precedes its look at `sleepers_`: one of the two sees the other.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  FutexWait(&count_, seen, until - now);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

absl::StatusOr<std::shared_ptr<SharedHost>> SharedHost::Create(int world_rank) {
  FSDP_ASSIGN_OR_RETURN(auto mailbox,
                        SharedSegment::Create(sizeof(SharedMailbox)));
  return std::shared_ptr<SharedHost>(
      new SharedHost(world_rank, std::move(mailbox)));
}

SharedHost::SharedHost(int world_rank, std::unique_ptr<SharedSegment> mailbox)
    : world_rank_(world_rank),
      mailbox_(std::move(mailbox)),
      heap_(MakeHeap(mailbox_)) {}

absl::Status SharedHost::Connect(absl::Span<const SegmentAddress> mailboxes) {
  for (const SegmentAddress& address : mailboxes) {
    FSDP_ASSIGN_OR_RETURN(auto segment, SharedSegment::Open(address));
    segment->Seal();
    if (segment->bytes() < static_cast<int64_t>(sizeof(SharedMailbox))) {
      return absl::UnavailableError(
          absl::StrCat("a mailbox of ", segment->bytes(),
                       " bytes: another program, or another build of this"));
    }
    mailboxes_.push_back(reinterpret_cast<SharedMailbox*>(segment->data()));
    segments_.push_back(std::move(segment));
    processes_.push_back(std::make_unique<PeerProcess>(address.pid));
  }
  // With more ranks than cores, spinning keeps a peer from its work.
  const int num_ranks = static_cast<int>(mailboxes.size());
  spin_ = num_ranks <= NumCores() ? kSpin : absl::ZeroDuration();
  absl::MutexLock lock(&mutex_);
  frees_seen_.assign(mailboxes.size(), 0);
  return absl::OkStatus();
}

void SharedHost::Add(std::function<bool()> source) {
  sources_.push_back(std::move(source));
}

void SharedHost::ProgressAll() {
  ForgetWhatPeersFreed();
  sources_.erase(std::remove_if(sources_.begin(), sources_.end(),
                                [](const auto& source) { return !source(); }),
                 sources_.end());
}

void SharedHost::ForgetWhatPeersFreed() {
  for (size_t peer = 0; peer < mailboxes_.size(); ++peer) {
    const uint64_t frees =
        mailboxes_[peer]->frees.load(std::memory_order_acquire);
    if (frees == frees_seen_[peer]) continue;
    frees_seen_[peer] = frees;
    heap_->Forget(static_cast<int>(peer));
  }
}

void SharedHost::AwaitRing(uint32_t seen, absl::Time until) {
  own().doorbell.Await(seen, spin_, until);
}

}  // namespace fsdp::comm
