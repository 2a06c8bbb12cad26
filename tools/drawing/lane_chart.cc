#include "tools/drawing/lane_chart.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace fsdp::drawing {
namespace {

using Bar = LaneChart::Bar;
using Style = LaneChart::Style;

constexpr double kLeft = 150;      // of the lanes
constexpr double kWidth = 1180;    // of the lanes
constexpr double kMargin = 30;     // right of them
constexpr double kTop = 72;        // of the first lane
constexpr double kHeight = 30;     // of a lane
constexpr double kLaneGap = 5;     // below a lane
constexpr double kGroupGap = 14;   // below a group, more
constexpr double kLetter = 6.4;    // width of one in a label, at most
constexpr double kLeastBar = 0.8;  // narrower ones are drawn together
constexpr double kLegendRow = 24;

std::string Escape(absl::string_view text) {
  std::string escaped = absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
  // Control characters cannot be written in XML.
  std::replace_if(
      escaped.begin(), escaped.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return escaped;
}

std::string Time(double seconds) {
  const double size = std::abs(seconds);
  if (size == 0) return "0";
  if (size >= 1) return absl::StrFormat("%.4g s", seconds);
  if (size >= 1e-3) return absl::StrFormat("%.4g ms", seconds * 1e3);
  return absl::StrFormat("%.4g us", seconds * 1e6);
}

// Between ticks: 1, 2 or 5 times a power of ten, at most a tenth of `length`.
double TickOf(double length) {
  const double power = std::pow(10, std::floor(std::log10(length / 10)));
  for (const double factor : {5.0, 2.0}) {
    if (factor * power <= length / 10) return factor * power;
  }
  return power;
}

// The whole name, or what comes behind its last dot, or nothing.
absl::string_view LabelThatFits(absl::string_view name, double width) {
  const size_t dot = name.rfind('.');
  for (const absl::string_view label :
       {name, dot == absl::string_view::npos ? "" : name.substr(dot + 1)}) {
    if (kLetter * static_cast<double>(label.size()) + 4 <= width) {
      return label;
    }
  }
  return "";
}

class Drawing {
 public:
  explicit Drawing(const LaneChart& chart)
      : chart_(chart), length_(chart.end - chart.begin) {
    double y = kTop;
    for (size_t i = 0; i < chart.lanes.size(); ++i) {
      if (i > 0 && chart.lanes[i].group != chart.lanes[i - 1].group) {
        y += kGroupGap;
      }
      lane_tops_.push_back(y);
      y += kHeight + kLaneGap;
    }
    bottom_ = y;
    for (const Bar& bar : chart.bars) used_styles_.insert(bar.style);
  }

  std::string Draw() {
    std::string body;
    std::swap(body, text_);
    DrawAxis();
    DrawLanes();
    for (size_t lane = 0; lane < chart_.lanes.size(); ++lane) {
      DrawBars(static_cast<int>(lane));
    }
    const double end = DrawLegend();
    std::swap(body, text_);
    DrawFrame(end + 16);
    return absl::StrCat(text_, body, "</svg>\n");
  }

 private:
  double X(double time) const {
    return kLeft + (length_ > 0 ? kWidth * (time - chart_.begin) / length_ : 0);
  }

  std::string Fill(int style) const {
    if (!chart_.styles[style].hatched) return chart_.styles[style].fill;
    return absl::StrFormat("url(#hatch%d)", style);
  }

  void DrawFrame(double height) {
    const double width = kLeft + kWidth + kMargin;
    absl::StrAppendFormat(
        &text_,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" "
        "viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" font-size=\"12\">\n"
        "<defs>\n",
        width, height, width, height);
    for (const int style : used_styles_) {
      if (!chart_.styles[style].hatched) continue;
      absl::StrAppendFormat(
          &text_,
          "<pattern id=\"hatch%d\" width=\"6\" height=\"6\" "
          "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">"
          "<rect width=\"6\" height=\"6\" fill=\"%s\" fill-opacity=\"0.25\"/>"
          "<rect width=\"3\" height=\"6\" fill=\"%s\"/></pattern>\n",
          style, chart_.styles[style].fill, chart_.styles[style].fill);
    }
    absl::StrAppendFormat(
        &text_,
        "</defs>\n<rect width=\"%g\" height=\"%g\" fill=\"#fff\"/>\n"
        "<text x=\"16\" y=\"26\" font-size=\"16\" font-weight=\"bold\">%s"
        "</text>\n<text x=\"16\" y=\"47\" fill=\"#444\">%s</text>\n",
        width, height, Escape(chart_.title), Escape(chart_.subtitle));
  }

  void DrawAxis() {
    if (!(length_ > 0)) return;
    const double tick = TickOf(length_);
    for (int i = 0; i * tick <= length_ * (1 + 1e-9); ++i) {
      const double x = X(chart_.begin + i * tick);
      absl::StrAppendFormat(
          &text_,
          "<path d=\"M%.2f %g V%g\" stroke=\"#d4d4d4\"/>"
          "<text x=\"%.2f\" y=\"%g\" text-anchor=\"middle\" fill=\"#444\">%s"
          "</text>\n",
          x, kTop - 5, bottom_ + 3, x, bottom_ + 17, Time(i * tick));
    }
  }

  void DrawLanes() {
    for (size_t i = 0; i < chart_.lanes.size(); ++i) {
      const double y = lane_tops_[i];
      absl::StrAppendFormat(
          &text_,
          "<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" fill=\"#000\" "
          "fill-opacity=\"0.04\"/><text x=\"%g\" y=\"%g\" text-anchor=\"end\">"
          "%s</text>\n",
          kLeft, y, kWidth, kHeight, kLeft - 10, y + kHeight / 2 + 4,
          Escape(chart_.lanes[i].name));
      if (i == 0 || chart_.lanes[i].group != chart_.lanes[i - 1].group) {
        absl::StrAppendFormat(
            &text_, "<text x=\"16\" y=\"%g\" font-weight=\"bold\">%s</text>\n",
            y + kHeight / 2 + 4, Escape(chart_.lanes[i].group));
      }
    }
  }

  // Neighbours too narrow to be seen become one bar, in the style that most of
  // its time has.
  void DrawBars(int lane) {
    std::map<std::pair<int, int>, std::vector<Bar>> narrow;  // by part
    for (const Bar& bar : chart_.bars) {
      if (bar.lane != lane) continue;
      std::vector<Bar>& together = narrow[{bar.parts, bar.part}];
      const bool is_wide = X(bar.end) - X(bar.begin) >= kLeastBar;
      if (is_wide || (!together.empty() &&
                      X(bar.end) - X(together.front().begin) > kLeastBar)) {
        DrawTogether(together);
        together.clear();
      }
      if (is_wide) {
        DrawBar(bar);
      } else {
        together.push_back(bar);
      }
    }
    for (const auto& [part, together] : narrow) DrawTogether(together);
  }

  void DrawTogether(const std::vector<Bar>& bars) {
    if (bars.empty()) return;
    std::map<int, double> seconds;
    const Bar* most = &bars.front();
    for (const Bar& bar : bars) {
      seconds[bar.style] += bar.end - bar.begin;
      if (seconds[bar.style] > seconds[most->style]) most = &bar;
    }
    Bar one = *most;
    one.begin = bars.front().begin;
    one.end = bars.back().end;
    if (bars.size() > 1) {
      one.title = absl::StrFormat("%s and %d more", one.title, bars.size() - 1);
    }
    DrawBar(one);
  }

  void DrawBar(const Bar& bar) {
    const Style& style = chart_.styles[bar.style];
    const double height = kHeight / bar.parts;
    const double y = lane_tops_[bar.lane] + bar.part * height;
    const double width = X(bar.end) - X(bar.begin);
    absl::StrAppendFormat(
        &text_,
        "<g><title>%s: %s, from %s</title><rect x=\"%.2f\" y=\"%.2f\" "
        "width=\"%.2f\" height=\"%.2f\" fill=\"%s\"%s/>",
        Escape(bar.title), Time(bar.end - bar.begin),
        Time(bar.begin - chart_.begin), X(bar.begin), y, width, height,
        Fill(bar.style),
        width > 3 ? " stroke=\"#fff\" stroke-width=\"0.6\"" : "");
    const absl::string_view label = LabelThatFits(bar.label, width);
    if (!label.empty() && !style.hatched && height >= 12) {
      absl::StrAppendFormat(
          &text_,
          "<text x=\"%.2f\" y=\"%.2f\" text-anchor=\"middle\" "
          "font-size=\"11\" fill=\"%s\">%s</text>",
          (X(bar.begin) + X(bar.end)) / 2, y + height / 2 + 4, style.text,
          Escape(label));
    }
    text_ += "</g>\n";
  }

  // Returns where it ends.
  double DrawLegend() {
    double x = kLeft;
    double y = bottom_ + 34;
    for (const int style : used_styles_) {
      const std::string& name = chart_.styles[style].name;
      const double width = 40 + kLetter * static_cast<double>(name.size());
      if (x > kLeft && x + width > kLeft + kWidth) {
        x = kLeft;
        y += kLegendRow;
      }
      absl::StrAppendFormat(
          &text_,
          "<rect x=\"%g\" y=\"%g\" width=\"16\" height=\"16\" fill=\"%s\"/>"
          "<text x=\"%g\" y=\"%g\">%s</text>\n",
          x, y, Fill(style), x + 22, y + 13, Escape(name));
      x += width;
    }
    return y + 16;
  }

  const LaneChart& chart_;
  const double length_;
  std::vector<double> lane_tops_;
  double bottom_ = 0;  // of the last lane
  std::set<int> used_styles_;
  std::string text_;
};

}  // namespace

std::string ToSvg(const LaneChart& chart) { return Drawing(chart).Draw(); }

}  // namespace fsdp::drawing
