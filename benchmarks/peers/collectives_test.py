#!/usr/bin/env python3
"""Tests of what is read from Google Benchmark and from the peer, and of the table."""
import json
import unittest

import collectives
import processes

SMALL, MIDDLE, LARGE = 64 << 10, 16 << 20, 128 << 20


def benchmark(name, real_time=2.0, unit="ms", **more):
    return {"name": name, "run_name": name, "run_type": "iteration", "real_time": real_time, "cpu_time": 1.0,
            "time_unit": unit, **more}


def parse(*entries):
    return collectives.parse_benchmark(json.dumps({"context": {}, "benchmarks": entries}))


class CollectivesTest(unittest.TestCase):

    def test_names(self):
        for name, operation, backend, size, ranks in [
                ("BM_Collective/local_all_gather/bytes:65536/ranks:2/real_time", "all-gather", "local", 65536, 2),
                ("BM_Collective/gloo_reduce_scatter/bytes:1048576/ranks:4/real_time", "reduce-scatter", "gloo",
                 1 << 20, 4),
                ("AllGather/shared_memory/16777216", "all-gather", "shared memory", MIDDLE, None),
                ("AllReduce/SharedMemory/16777216/2", "all-reduce", "shared memory", MIDDLE, 2),
                ("BM_Collective/shared_memory_all_gather_cast/bytes:5/ranks:2", "all-gather, cast",
                 "shared memory", 5, 2),
        ]:
            self.assertEqual(collectives.parse_name(name), (collectives.Key(operation, backend, size), ranks), name)

    def test_names_of_something_else(self):
        for name in ("BM_Memcpy/bytes:4", "local_all_gather", "BM_Create/100"):
            self.assertIsNone(collectives.parse_name(name), name)

    def test_benchmark_json(self):
        name = "BM_Collective/local_all_gather/bytes:65536/ranks:2/real_time"
        key = collectives.Key("all-gather", "local", SMALL)
        self.assertEqual(parse(benchmark(name, 250, "us", of_memcpy=0.5)), {key: (250e-6, 0.5)})
        # Of repetitions the median, whatever aggregates stand beside them; of other numbers of ranks nothing.
        self.assertEqual(parse(benchmark(name, 1), benchmark(name, 3), benchmark(name, 9),
                               benchmark(name, 7, run_type="aggregate", aggregate_name="mean"),
                               benchmark(name.replace("ranks:2", "ranks:4"))), {key: (3e-3, None)})

    def test_benchmark_errors(self):
        with self.assertRaisesRegex(processes.RunError, "local_all_gather/4/2: no memory"):
            parse(benchmark("local_all_gather/4/2", error_occurred=True, error_message="no memory"))
        for text in ("", "{}", '{"benchmarks": [{}]}',
                     json.dumps({"benchmarks": [benchmark("local_all_gather/4/2", unit="min")]})):
            with self.assertRaisesRegex(processes.RunError, "expected Google Benchmark's JSON"):
                collectives.parse_benchmark(text)

    def test_peer_lines(self):
        text = 'warning\n{"op": "all_gather", "bytes": 65536, "ranks": 2, "ms": 0.5, "GB/s": 0.1}\n'
        self.assertEqual(collectives.parse_peer(text),
                         {collectives.Key("all-gather", "Gloo from Python", SMALL): (5e-4, None)})
        with self.assertRaisesRegex(processes.RunError, "peer_collectives.py"):
            collectives.parse_peer('{"op": "all_gather"}')

    def test_table(self):
        key = collectives.Key
        rounds = [{
            key("all-gather", "local", SMALL): collectives.Timing(10e-6, None),
            key("all-gather", "local", MIDDLE): collectives.Timing(2 * scale * MIDDLE / 1e9, 0.25),
            key("all-gather, cast", "local", MIDDLE): collectives.Timing(scale * MIDDLE / 1e9, 0.5),
            key("all-gather", "gloo", MIDDLE): collectives.Timing(1, None),
            key("all-gather", collectives.PYTHON_GLOO, SMALL): collectives.Timing(300e-6, None),
            key("all-gather", collectives.PYTHON_GLOO, MIDDLE): collectives.Timing(8 * scale * MIDDLE / 1e9, None),
        } for scale in (1, 2, 1)]
        self.assertEqual(collectives.table(rounds)[1:], [
            ["all-gather: local", "10", "30.0 (30.0-30.0)", "0.50", "0.25", "4.0 (4.0-4.0)", "", "", ""],
            ["all-gather: gloo", "", "", "0.02", "", "0.1 (0.1-0.3)", "", "", ""],
            ["all-gather: Gloo from Python", "300", "", "0.12", "", "", "", "", ""],
            ["all-gather, cast: local", "", "", "1.00", "0.50", "8.0 (8.0-8.0)", "", "", ""],
        ])

    def test_table_without_python(self):
        rounds = [{collectives.Key("all-reduce", "local", SMALL): collectives.Timing(1e-5, None),
                   collectives.Key("all-reduce", "gloo", SMALL): collectives.Timing(2e-5, None)}]
        self.assertEqual([row[:3] for row in collectives.table(rounds)[1:]],
                         [["all-reduce: local", "10", "2.0"], ["all-reduce: gloo", "20", ""]])
        alone = {collectives.Key("all-reduce", "local", LARGE): collectives.Timing(1, None)}
        self.assertEqual(collectives.table([alone])[1], ["all-reduce: local", "", "", "", "", "", "0.13", "", ""])

    def test_csv(self):
        rounds = [{collectives.Key("all-reduce", "local", SMALL): collectives.Timing(0.5, None)}]
        self.assertEqual(collectives.as_csv(rounds),
                         "round,operation,backend,bytes,seconds,of_memcpy\n1,all-reduce,local,65536,0.5,\n")


if __name__ == "__main__":
    unittest.main()
