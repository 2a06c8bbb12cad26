#include "tools/simulator/svg_timeline.h"

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "tools/simulator/timeline.h"

namespace fsdp::simulator {
namespace {

constexpr double kLeft = 96;     // of the lanes
constexpr double kWidth = 1180;  // of the lanes
constexpr double kMargin = 24;   // right of them
constexpr double kTop = 70;      // of the first lane
constexpr double kBar = 34;      // height
constexpr double kLane = 46;     // height, with the space between
constexpr double kLetter = 6.2;  // width of one in a bar
constexpr double kLeastBar = 1;  // narrower ones are drawn as one
constexpr int kLanes = 4;
constexpr double kBottom = kTop + kLanes * kLane;

struct Style {
  SpanKind kind;
  int lane;
  const char* fill;
  const char* text;  // colour of names in it
};

const Style kStyles[] = {
    {SpanKind::kForward, 0, "#4e79a7", "#fff"},
    {SpanKind::kBackward, 0, "#254e77", "#fff"},
    {SpanKind::kWait, 0, "url(#wait)", "#8c1414"},
    {SpanKind::kCopy, 1, "#8f8881", "#fff"},
    {SpanKind::kOptimizer, 1, "#8464a8", "#fff"},
    {SpanKind::kGather, 2, "#59a14f", "#fff"},
    {SpanKind::kReduce, 3, "#f0923a", "#222"},
    {SpanKind::kReplicate, 3, "#b07408", "#fff"},
};
const char* const kLaneNames[kLanes] = {"compute", "memory", "gathers",
                                        "reductions"};

const Style& StyleOf(SpanKind kind) {
  for (const Style& style : kStyles) {
    if (style.kind == kind) return style;
  }
  return kStyles[0];
}

std::string Escape(absl::string_view text) {
  std::string escaped = absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
  // XML has no way to write these.
  for (char& c : escaped) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return escaped;
}

// The longest of "blocks.11" and "11" that fits; none where none does.
absl::string_view NameThatFits(absl::string_view name, double width) {
  const auto fits = [width](absl::string_view text) {
    return kLetter * static_cast<double>(text.size()) + 4 <= width;
  };
  if (fits(name)) return name;
  const size_t dot = name.rfind('.');
  if (dot != absl::string_view::npos && fits(name.substr(dot + 1))) {
    return name.substr(dot + 1);
  }
  return "";
}

// 1, 2 or 5 times a power of ten, for about ten of them.
double TickStep(double seconds) {
  const double power = std::pow(10, std::floor(std::log10(seconds / 10)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (seconds / (factor * power) <= 12) return factor * power;
  }
  return 10 * power;
}

std::string FormatTime(double seconds) {
  if (seconds == 0) return "0";
  if (seconds >= 1) return absl::StrFormat("%.5g s", seconds);
  if (seconds >= 1e-3) return absl::StrFormat("%.5g ms", seconds * 1e3);
  return absl::StrFormat("%.5g us", seconds * 1e6);
}

class Drawing {
 public:
  Drawing(const ModelShape& model, const StepResult& step)
      : model_(model), step_(step) {}

  std::string Draw(absl::string_view title) {
    Begin(title);
    DrawAxis();
    DrawLanes();
    for (int lane = 0; lane < kLanes; ++lane) DrawBars(lane);
    DrawLegend();
    text_ += "</svg>\n";
    return std::move(text_);
  }

 private:
  double X(double time) const {
    return step_.seconds == 0 ? kLeft : kLeft + kWidth * time / step_.seconds;
  }

  void Begin(absl::string_view title) {
    const double width = kLeft + kWidth + kMargin;
    const double height = kBottom + 76;
    absl::StrAppendFormat(
        &text_,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" "
        "height=\"%g\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" "
        "font-size=\"12\">\n"
        "<defs><pattern id=\"wait\" width=\"7\" height=\"7\" "
        "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">"
        "<rect width=\"7\" height=\"7\" fill=\"#fbd5d3\"/>"
        "<rect width=\"3\" height=\"7\" fill=\"#d62728\"/></pattern></defs>\n"
        "<rect width=\"%g\" height=\"%g\" fill=\"#fff\"/>\n"
        "<text x=\"%g\" y=\"26\" font-size=\"16\" font-weight=\"bold\">%s"
        "</text>\n",
        width, height, width, height, width, height, kLeft, Escape(title));
    const Spent& total = step_.total;
    absl::StrAppendFormat(
        &text_,
        "<text x=\"%g\" y=\"47\" fill=\"#444\">step %s: compute %s, copies "
        "%s, optimizer %s, exposed gathers %s, exposed reductions %s</text>\n",
        kLeft, FormatTime(step_.seconds), FormatTime(total.compute),
        FormatTime(total.copies), FormatTime(total.optimizer),
        FormatTime(total.exposed_gather), FormatTime(total.exposed_reduce));
  }

  void DrawAxis() {
    if (step_.seconds == 0) return;
    const double tick = TickStep(step_.seconds);
    for (int i = 0; i * tick <= step_.seconds * (1 + 1e-9); ++i) {
      absl::StrAppendFormat(
          &text_,
          "<path d=\"M%.2f %g V%g\" stroke=\"#d8d8d8\"/>"
          "<text x=\"%.2f\" y=\"%g\" text-anchor=\"middle\" fill=\"#444\">%s"
          "</text>\n",
          X(i * tick), kTop - 6, kBottom + 2, X(i * tick), kBottom + 17,
          FormatTime(i * tick));
    }
  }

  void DrawLanes() {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double y = kTop + lane * kLane;
      absl::StrAppendFormat(
          &text_,
          "<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" "
          "fill=\"#000\" fill-opacity=\"0.04\"/>"
          "<text x=\"%g\" y=\"%g\" text-anchor=\"end\">%s</text>\n",
          kLeft, y, kWidth, kBar, kLeft - 10, y + kBar / 2 + 4,
          kLaneNames[lane]);
    }
  }

  // Spans too narrow to see share the bar of the one that takes most time.
  void DrawBars(int lane) {
    std::vector<Span> narrow;
    for (const Span& span : step_.timeline) {
      if (StyleOf(span.kind).lane != lane) continue;
      const bool is_wide = X(span.end) - X(span.begin) >= kLeastBar;
      if (is_wide || (!narrow.empty() &&
                      X(span.end) - X(narrow.front().begin) > kLeastBar)) {
        DrawTogether(narrow);
        narrow.clear();
      }
      if (is_wide) {
        DrawBar(span);
      } else {
        narrow.push_back(span);
      }
    }
    DrawTogether(narrow);
  }

  void DrawTogether(const std::vector<Span>& spans) {
    if (spans.empty()) return;
    std::map<SpanKind, double> seconds;
    Span bar = spans.front();
    for (const Span& span : spans) {
      seconds[span.kind] += span.end - span.begin;
      if (seconds[span.kind] > seconds[bar.kind]) bar.kind = span.kind;
    }
    bar.end = spans.back().end;
    DrawBar(bar);
  }

  void DrawBar(const Span& bar) {
    const Style& style = StyleOf(bar.kind);
    const double y = kTop + style.lane * kLane;
    const double width = X(bar.end) - X(bar.begin);
    const std::string& name = model_.units[bar.unit].name;
    absl::StrAppendFormat(
        &text_,
        "<g><title>%s of %s: %s, from %s</title>"
        "<rect x=\"%.2f\" y=\"%g\" width=\"%.2f\" height=\"%g\" "
        "fill=\"%s\"%s/>",
        Name(bar.kind), Escape(name), FormatTime(bar.end - bar.begin),
        FormatTime(bar.begin), X(bar.begin), y, width, kBar, style.fill,
        width > 3 ? " stroke=\"#fff\" stroke-width=\"0.6\"" : "");
    const absl::string_view label = NameThatFits(name, width);
    if (!label.empty() && bar.kind != SpanKind::kWait) {
      absl::StrAppendFormat(&text_,
                            "<text x=\"%.2f\" y=\"%g\" text-anchor=\"middle\" "
                            "font-size=\"11\" fill=\"%s\">%s</text>",
                            (X(bar.begin) + X(bar.end)) / 2, y + kBar / 2 + 4,
                            style.text, Escape(label));
    }
    text_ += "</g>\n";
  }

  void DrawLegend() {
    double x = kLeft;
    const double y = kBottom + 40;
    for (const Style& style : kStyles) {
      absl::StrAppendFormat(
          &text_,
          "<rect x=\"%g\" y=\"%g\" width=\"16\" height=\"16\" fill=\"%s\"/>"
          "<text x=\"%g\" y=\"%g\">%s</text>\n",
          x, y, style.fill, x + 22, y + 13, Name(style.kind));
      x += 145;
    }
  }

  const ModelShape& model_;
  const StepResult& step_;
  std::string text_;
};

}  // namespace

std::string DrawTimeline(const ModelShape& model, const StepResult& step,
                         absl::string_view title) {
  return Drawing(model, step).Draw(title);
}

}  // namespace fsdp::simulator
