#!/usr/bin/env python3
"""Tests of tables and of replacing them in documents."""
import unittest

import summary
import tables

BEGIN, END = tables.markers("peers")


class TablesTest(unittest.TestCase):

    def test_markdown(self):
        rows = [["a", "bcd"], ["ef", ""]]
        self.assertEqual(tables.markdown(rows), "| a | bcd |\n|---|---|\n| ef |  |")
        self.assertEqual(tables.markdown(rows, aligned=True),
                         "| a  | bcd |\n|----|-----|\n| ef |     |")

    def test_figures(self):
        self.assertEqual([tables.milliseconds(value) for value in (0.0123, 1.5, 99.94, 123.4, 3355.1)],
                         ["0.0123", "1.5", "99.9", "123", "3,355"])
        self.assertEqual(tables.with_spread(summary.summarize([2.0, 1.0, 4.0]), "{:.1f}".format), "2.0 (1.0-4.0)")
        self.assertEqual(tables.with_spread(summary.summarize([2.0]), "{:.1f}".format), "2.0")
        self.assertEqual(tables.with_spread(summary.summarize([2.0, 1.0]), "{:.1f}".format, "ms"), "1.5 ms (1.0-2.0)")
        self.assertEqual(tables.with_spread(None, "{:.1f}".format), "")

    def test_replacing_leaves_the_rest(self):
        document = f"# A\n\n{BEGIN}\nold\n| table |\n{END}\n\nafter\n"
        replaced = tables.replace_between(document, "peers", "\nnew\n")
        self.assertEqual(replaced, f"# A\n\n{BEGIN}\nnew\n{END}\n\nafter\n")
        self.assertEqual(tables.replace_between(replaced, "peers", "new"), replaced)

    def test_documents_without_a_place_for_the_table(self):
        for document in ("", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}", f" {BEGIN}\n{END}"):
            with self.assertRaisesRegex(ValueError, "expected one line '<!-- peers:begin"):
                tables.replace_between(document, "peers", "new")


if __name__ == "__main__":
    unittest.main()
