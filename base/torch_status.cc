#include "base/torch_status.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/exception.h>

#include <exception>
#include <new>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

absl::Status FromTorch(absl::StatusCode code, absl::string_view what,
                       const c10::Error& error) {
  return absl::Status(code,
                      absl::StrCat(what, ": ", error.what_without_backtrace()));
}

// The CPU's allocator throws no OutOfMemoryError; its text says how many bytes.
constexpr absl::string_view kOutOfHostMemory =
    "DefaultCPUAllocator: can't allocate memory";

absl::StatusCode CodeOf(absl::string_view text, absl::StatusCode otherwise) {
  if (absl::StrContains(text, kMisuseMark)) {
    return absl::StatusCode::kFailedPrecondition;
  }
  if (absl::StrContains(text, kOutOfHostMemory)) {
    return absl::StatusCode::kResourceExhausted;
  }
  return otherwise;
}

}  // namespace

absl::Status FallibleRef::operator()() const {
  if (const auto* returning = std::get_if<1>(&fn_)) return (*returning)();
  std::get<0>(fn_)();
  return absl::OkStatus();
}

absl::Status TorchToStatus(absl::string_view what, FallibleRef fn) {
  return TorchToStatus([what] { return std::string(what); }, fn);
}

absl::Status TorchToStatus(absl::FunctionRef<std::string()> what,
                           FallibleRef fn) {
  try {
    return fn();
  } catch (const StatusError& e) {
    return e.status();
  } catch (const c10::OutOfMemoryError& e) {
    return FromTorch(absl::StatusCode::kResourceExhausted, what(), e);
  } catch (const c10::NotImplementedError& e) {
    return FromTorch(absl::StatusCode::kUnimplemented, what(), e);
  } catch (const c10::IndexError& e) {
    return FromTorch(absl::StatusCode::kOutOfRange, what(), e);
  } catch (const c10::ValueError& e) {
    return FromTorch(absl::StatusCode::kInvalidArgument, what(), e);
  } catch (const c10::TypeError& e) {
    return FromTorch(absl::StatusCode::kInvalidArgument, what(), e);
  } catch (const c10d::TimeoutError& e) {
    return FromTorch(absl::StatusCode::kDeadlineExceeded, what(), e);
  } catch (const c10::DistError& e) {
    return FromTorch(absl::StatusCode::kUnavailable, what(), e);
  } catch (const c10::Error& e) {
    return FromTorch(
        CodeOf(e.what_without_backtrace(), absl::StatusCode::kInternal), what(),
        e);
  } catch (const std::bad_alloc& e) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what(), ": out of memory (", e.what(), ")"));
  } catch (const std::system_error& e) {
    if (e.code() != std::errc::resource_unavailable_try_again) {
      return absl::UnknownError(absl::StrCat(what(), ": ", e.what()));
    }
    return absl::ResourceExhaustedError(absl::StrCat(
        what(), ": cannot start a thread: ", e.what(), "; ", ThreadLimits()));
  } catch (const std::exception& e) {
    // TorchScript wraps what its operators throw.
    return absl::Status(CodeOf(e.what(), absl::StatusCode::kUnknown),
                        absl::StrCat(what(), ": ", e.what()));
  }
}

}  // namespace fsdp
