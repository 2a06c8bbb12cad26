#include "tools/trace/trace_file.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/output_file.h"
#include "base/status_macros.h"

namespace fsdp::trace_report {
namespace {

const std::string* StringAt(const Json& json, absl::string_view key) {
  const Json* value = json.Find(key);
  return value == nullptr ? nullptr : value->As<std::string>();
}

std::optional<int64_t> IntegerAt(const Json& json, absl::string_view key) {
  const Json* value = json.Find(key);
  if (value == nullptr || value->As<int64_t>() == nullptr) return std::nullopt;
  return *value->As<int64_t>();
}

absl::Status Annotate(const absl::Status& status, absl::string_view what) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(what, ": ", status.message()));
}

bool IsNumber(const Json* json) {
  return json != nullptr &&
         (json->As<int64_t>() != nullptr || json->As<double>() != nullptr);
}

class Reader {
 public:
  absl::Status Read(const TraceText& file) {
    absl::StatusOr<Json> json = Json::Parse(file.text);
    if (!json.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          json.status().message(), ". Was the file written to its end?"));
    }
    const Json* events = json->Find("traceEvents");
    if (events == nullptr || events->As<Json::Array>() == nullptr) {
      return absl::InvalidArgumentError(
          "there is no array \"traceEvents\": this is no trace");
    }
    in_file_.clear();
    // Spans may precede the event that says from where their times count.
    for (const Json& event : *events->As<Json::Array>()) {
      FSDP_RETURN_IF_ERROR(ReadHeader(event));
    }
    if (in_file_.empty()) {
      return absl::InvalidArgumentError(
          "there is no event \"fsdp_trace\": this trace is not one of "
          "fsdp::Trace");
    }
    int64_t index = 0;
    for (const Json& event : *events->As<Json::Array>()) {
      FSDP_RETURN_IF_ERROR(
          Annotate(ReadSpan(event), absl::StrCat("event ", index++)));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<RankTrace>> Finish() {
    std::vector<RankTrace> traces;
    for (auto& [rank, trace] : ranks_) {
      std::stable_sort(trace.spans.begin(), trace.spans.end(),
                       [](const Span& a, const Span& b) {
                         return a.begin != b.begin ? a.begin < b.begin
                                                   : a.end > b.end;
                       });
      const bool has_steps = std::any_of(
          trace.spans.begin(), trace.spans.end(), [](const Span& span) {
            return span.category == TraceCategory::kStep;
          });
      if (!has_steps) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the trace of rank ", rank,
            " has no step that it holds from beginning to end: mark steps by "
            "fsdp::TraceStep",
            trace.num_dropped == 0 ? ""
                                   : ", and raise TraceOptions::capacity"));
      }
      traces.push_back(std::move(trace));
    }
    return traces;
  }

 private:
  absl::Status ReadHeader(const Json& event) {
    const std::string* name = StringAt(event, "name");
    if (name == nullptr || *name != "fsdp_trace") return absl::OkStatus();
    const std::optional<int64_t> rank = IntegerAt(event, "pid");
    const Json* args = event.Find("args");
    const std::string* base_text =
        args == nullptr ? nullptr : StringAt(*args, "base_ns");
    int64_t base = 0;
    if (!rank || *rank < 0 || base_text == nullptr ||
        !absl::SimpleAtoi(*base_text, &base)) {
      return absl::InvalidArgumentError(
          "the event \"fsdp_trace\" is damaged: it has a \"pid\" and, in "
          "\"args\", \"base_ns\"");
    }
    const int64_t version = IntegerAt(*args, "version").value_or(0);
    if (version != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("the trace has version ", version,
                       ", this program knows 1: use that of the same source"));
    }
    if (ranks_.count(*rank) > 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", *rank,
          " is there twice: give the files of one run, each of them once"));
    }
    if (ranks_.empty()) first_base_ = base;
    in_file_[*rank] = base - first_base_;
    RankTrace& trace = ranks_[*rank];
    trace.rank = static_cast<int>(*rank);
    trace.num_dropped = IntegerAt(*args, "dropped").value_or(0);
    return absl::OkStatus();
  }

  absl::Status ReadSpan(const Json& event) {
    const std::string* kind = StringAt(event, "ph");
    if (kind == nullptr) return absl::InvalidArgumentError("it has no \"ph\"");
    if (*kind != "X") return absl::OkStatus();
    const std::string* name = StringAt(event, "name");
    const std::string* category = StringAt(event, "cat");
    const std::optional<int64_t> rank = IntegerAt(event, "pid");
    const Json* begin = event.Find("ts");
    const Json* length = event.Find("dur");
    if (name == nullptr || category == nullptr || !rank || !IsNumber(begin) ||
        !IsNumber(length)) {
      return absl::InvalidArgumentError(
          "it lacks one of \"name\", \"cat\", \"pid\", \"ts\" and \"dur\"");
    }
    const std::optional<TraceCategory> known = TraceCategoryOf(*category);
    if (!known) {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown category \"", *category, "\""));
    }
    const auto shift = in_file_.find(*rank);
    if (shift == in_file_.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "its rank ", *rank, " has no event \"fsdp_trace\" in this file"));
    }
    if (length->NumberOr(0) < 0) {
      return absl::InvalidArgumentError("it ends before it begins");
    }
    Span span;
    span.category = *known;
    span.name = *name;
    // Whole nanoseconds make spans that touch do so exactly.
    const auto nanoseconds = [](const Json& microseconds) {
      return std::llround(microseconds.NumberOr(0) * 1e3);
    };
    const int64_t begin_ns = shift->second + nanoseconds(*begin);
    span.begin = static_cast<double>(begin_ns) * 1e-9;
    span.end = static_cast<double>(begin_ns + nanoseconds(*length)) * 1e-9;
    if (const Json* args = event.Find("args")) {
      if (const std::string* unit = StringAt(*args, "unit")) span.unit = *unit;
      span.bytes = IntegerAt(*args, "bytes").value_or(0);
      span.step = IntegerAt(*args, "step").value_or(0);
    }
    ranks_[*rank].spans.push_back(std::move(span));
    return absl::OkStatus();
  }

  std::map<int64_t, RankTrace> ranks_;
  // For ranks of this file, nanoseconds from first_base_ to where times begin.
  std::map<int64_t, int64_t> in_file_;
  int64_t first_base_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<RankTrace>> ParseTraces(
    absl::Span<const TraceText> files) {
  Reader reader;
  for (const TraceText& file : files) {
    FSDP_RETURN_IF_ERROR(
        Annotate(reader.Read(file), absl::StrCat("trace ", file.path)));
  }
  return reader.Finish();
}

absl::StatusOr<std::vector<RankTrace>> ReadTraces(
    absl::Span<const std::string> paths) {
  std::vector<TraceText> files;
  for (const std::string& path : paths) {
    absl::StatusOr<std::string> text = ReadRegularFile(path);
    FSDP_RETURN_IF_ERROR(Annotate(text.status(), absl::StrCat("trace ", path)));
    files.push_back({path, *std::move(text)});
  }
  return ParseTraces(files);
}

}  // namespace fsdp::trace_report
