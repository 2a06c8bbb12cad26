#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/json.h"
#include "fsdp/trace/trace_timeline.h"

namespace fsdp {
namespace {

using Span = TraceTimeline::Span;

// Rows of the rank in a viewer, from top to bottom. Collectives in flight come
// last, in as many rows as there are lanes.
enum Row {
  kStepRow = 1,
  kComputeRow,
  kWaitRow,
  kLibraryRow,
  kGatheringRow = 100,
  kReducingRow = 200,
};

// Goes by the groups of TraceCategory.
int RowOf(const Span& span) {
  if (span.category <= TraceCategory::kBackward) return kComputeRow;
  if (span.category <= TraceCategory::kAgreement) return kWaitRow;
  if (span.category <= TraceCategory::kBookkeeping) return kLibraryRow;
  if (span.category <= TraceCategory::kStep) return kStepRow;
  return span.lane + (span.category == TraceCategory::kGathering
                          ? kGatheringRow
                          : kReducingRow);
}

std::string NameOf(int row) {
  if (row >= kReducingRow) {
    return absl::StrCat("reductions in flight ", row - kReducingRow + 1);
  }
  if (row >= kGatheringRow) {
    return absl::StrCat("gathers in flight ", row - kGatheringRow + 1);
  }
  return row == kStepRow      ? "steps"
         : row == kComputeRow ? "compute"
         : row == kWaitRow    ? "exposed communication"
                              : "fsdp";
}

std::string Quoted(absl::string_view text) { return Json(text).ToString(); }

class Writer {
 public:
  explicit Writer(const TraceOfRank& of) : of_(of) {}

  std::string Write(const TraceTimeline& timeline) {
    Metadata("fsdp_trace", 0,
             absl::StrCat("\"version\":1,\"base_ns\":\"", of_.base_ns,
                          "\",\"dropped\":", of_.num_dropped));
    Metadata("process_name", 0,
             absl::StrCat("\"name\":\"rank ", of_.rank, "\""));
    Metadata("process_sort_index", 0,
             absl::StrCat("\"sort_index\":", of_.rank));
    std::set<int> rows;
    for (const Span& span : timeline.spans) rows.insert(RowOf(span));
    for (const int row : rows) {
      Metadata("thread_name", row,
               absl::StrCat("\"name\":", Quoted(NameOf(row))));
      Metadata("thread_sort_index", row, absl::StrCat("\"sort_index\":", row));
    }
    for (const Span& span : timeline.spans) Complete(span);
    for (const TraceTimeline::Memory& sample : timeline.memory) {
      Counter("unsharded parameters", sample.time_ns, sample.unsharded);
      Counter("reduce buffers", sample.time_ns, sample.reduce_buffers);
    }
    return std::move(text_);
  }

 private:
  void Begin() {
    if (!text_.empty()) text_ += ",\n";
  }

  void Metadata(absl::string_view name, int row, absl::string_view args) {
    Begin();
    absl::StrAppend(&text_, "{\"ph\":\"M\",\"name\":\"", name,
                    "\",\"pid\":", of_.rank, ",\"tid\":", row, ",\"args\":{",
                    args, "}}");
  }

  void Complete(const Span& span) {
    Begin();
    absl::StrAppend(
        &text_, "{\"ph\":\"X\",\"name\":", Quoted(span.name), ",\"cat\":\"",
        Name(span.category), "\",\"pid\":", of_.rank, ",\"tid\":", RowOf(span),
        ",\"ts\":", Micros(span.begin_ns - of_.base_ns),
        ",\"dur\":", Micros(span.end_ns - span.begin_ns), ",\"args\":{");
    absl::string_view comma;
    if (span.category == TraceCategory::kStep) {
      absl::StrAppend(&text_, "\"step\":", span.step);
      comma = ",";
    }
    if (!span.unit.empty()) {
      absl::StrAppend(&text_, comma, "\"unit\":", Quoted(span.unit));
      comma = ",";
    }
    if (span.bytes > 0)
      absl::StrAppend(&text_, comma, "\"bytes\":", span.bytes);
    text_ += "}}";
  }

  void Counter(absl::string_view name, int64_t time_ns, int64_t bytes) {
    Begin();
    absl::StrAppend(&text_, "{\"ph\":\"C\",\"name\":\"", name,
                    "\",\"pid\":", of_.rank,
                    ",\"ts\":", Micros(time_ns - of_.base_ns),
                    ",\"args\":{\"bytes\":", bytes, "}}");
  }

  static std::string Micros(int64_t ns) {
    const int64_t size = ns < 0 ? -ns : ns;
    return absl::StrFormat("%s%d.%03d", ns < 0 ? "-" : "", size / 1000,
                           size % 1000);
  }

  const TraceOfRank& of_;
  std::string text_;
};

}  // namespace

std::string TraceEvents(const TraceTimeline& timeline, const TraceOfRank& of) {
  return Writer(of).Write(timeline);
}

std::string TraceFile(absl::Span<const std::string> events) {
  return absl::StrCat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n",
                      absl::StrJoin(events, ",\n"), "\n]}\n");
}

}  // namespace fsdp
