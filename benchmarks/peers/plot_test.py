#!/usr/bin/env python3
"""Tests of the plot: well-formed, and bars as long as their values."""
import unittest
import xml.etree.ElementTree

import plot

SVG = "{http://www.w3.org/2000/svg}"
BARS = [
    plot.Bar("ours & <theirs>", "#111111", True, (200.0, 180.0, 260.0), 400.0),
    plot.Bar("peer", "#222222", step=(400.0, 400.0, 400.0), memory=1000.0),
    plot.Bar("not measured", "#333333"),
]


def bar_widths(root, color):
    return [float(rect.get("width")) for rect in root.iter(f"{SVG}rect") if rect.get("fill") == color]


class PlotTest(unittest.TestCase):

    def test_bars_are_as_long_as_their_values(self):
        root = xml.etree.ElementTree.fromstring(plot.draw("t", ["a", "b"], [plot.Row("batch 1", BARS, 150.0)]))
        ours, peer = bar_widths(root, "#111111"), bar_widths(root, "#222222")
        self.assertEqual(len(ours), 2)
        self.assertAlmostEqual(peer[0] / ours[0], 2, places=2)
        self.assertAlmostEqual(peer[1] / ours[1], 2.5, places=2)
        self.assertEqual(bar_widths(root, "#333333"), [])

    def test_text_is_escaped_and_inside_the_picture(self):
        root = xml.etree.ElementTree.fromstring(plot.draw("a < b", [], [plot.Row("x", BARS), plot.Row("y", BARS)]))
        texts = [text.text for text in root.iter(f"{SVG}text")]
        self.assertIn("ours & <theirs>", texts)
        self.assertEqual(root.find(f"{SVG}title").text, "a < b")
        for text in root.iter(f"{SVG}text"):
            self.assertLess(float(text.get("y")), float(root.get("height")))
            self.assertLess(float(text.get("x")), plot.WIDTH)

    def test_steps_or_memory_alone(self):
        for bar in (plot.Bar("a", "#111111", step=(1.0, 1.0, 1.0)), plot.Bar("a", "#111111", memory=5.0)):
            root = xml.etree.ElementTree.fromstring(plot.draw("t", [], [plot.Row("x", [bar])]))
            self.assertEqual(len(bar_widths(root, "#111111")), 1)

    def test_ticks_are_round_and_reach_the_largest(self):
        self.assertEqual(plot.ticks(1405), [0, 500, 1000, 1500])
        self.assertEqual(plot.ticks(400), [0, 100, 200, 300, 400])
        for largest in (0.3, 1, 7, 99, 101, 1234, 5e6):
            marks = plot.ticks(largest)
            self.assertGreaterEqual(marks[-1], largest)
            self.assertLess(marks[-2], largest)
            self.assertLessEqual(len(marks), 6)


if __name__ == "__main__":
    unittest.main()
