#!/usr/bin/env python3
"""Tests of pool.py."""
import os
import pathlib
import signal
import sys
import tempfile
import time
import unittest

import pool

LIMIT_S = 60


def await_file(path):
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(str(path))
        time.sleep(0.005)


class PoolTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def test_calls_overlap_and_come_as_they_end(self):
        def meet(number):
            (self.folder / str(number)).touch()
            await_file(self.folder / str(2 if number == 0 else 1 - number % 2))
            return 10 * number
        # The first waits for the third, which begins when the second has ended.
        results = list(pool.run(meet, [0, 1, 2], 2))
        self.assertEqual(results[0], (1, 10))
        self.assertEqual(sorted(results), [(0, 0), (1, 10), (2, 20)])

    def test_no_more_than_it_is_told(self):
        def alone(number):
            (self.folder / "busy").mkdir()
            (self.folder / "busy").rmdir()
            return number
        self.assertEqual([result for _, result in pool.run(alone, range(20), 1)], list(range(20)))

    def test_takes_turns(self):
        turns = pool.Turns(self.folder, 1)

        def alone(number):
            with turns.take():
                (self.folder / "busy").mkdir()
                if number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)  # its turn ends
                (self.folder / "busy").rmdir()
            return number
        results = dict(pool.run(alone, range(3), 3))
        self.assertEqual(results, {0: 0, 1: 1, 2: 2})
        self.assertIsInstance(dict(pool.run(alone, [3], 1))[3], pool.Failed)
        (self.folder / "busy").rmdir()
        self.assertEqual(dict(pool.run(alone, [4], 1)), {4: 4})

    def test_as_many_have_a_turn_as_there_are(self):
        turns = pool.Turns(self.folder, 2)

        def meet(number):
            with turns.take():
                (self.folder / str(number)).touch()
                await_file(self.folder / str(1 - number))
        self.assertEqual(dict(pool.run(meet, [0, 1], 2)), {0: None, 1: None})

    def test_what_fails_is_no_more_than_one_item(self):
        def fail(how):
            if how == "raise":
                raise ValueError("the reason")
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return "well"
        results = dict(pool.run(fail, ["raise", "die", "live"], 2))
        self.assertIn("the reason", str(results["raise"]))
        self.assertIsInstance(results["die"], pool.Failed)
        self.assertEqual(str(results["die"]), "its process ended with -9")
        self.assertEqual(results["live"], "well")

    def test_who_leaves_ends_the_calls(self):
        def sleep(number):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            if number == 0:
                return await_file(self.folder / "1")
            try:
                (self.folder / str(number)).touch()
                time.sleep(LIMIT_S)
            finally:
                (self.folder / "cleared").touch()
        calls = pool.run(sleep, [0, 1], 2)
        next(calls)
        calls.close()
        self.assertTrue((self.folder / "cleared").exists())


if __name__ == "__main__":
    unittest.main()
