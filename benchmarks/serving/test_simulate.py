#!/usr/bin/env python3
"""The serving simulation against cases worked by hand, and laws that hold for any."""
import pathlib
import random
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import costs
import simulate

# A step takes 1 ms a request and 1 ms for each million bytes; a chunk's products 1 ms a thousand tokens.
COSTS = {"model": {"layers": 1, "q_heads": 1, "head_dim": 1, "parameters": 500_000}, "token_bytes_of_head": 1000,
         "step_ms": {"1": 1.0, "2": 2.0}, "attention_gbs": 1, "prefill_attention_tflops": 1e12, "product_tflops": 1.0,
         "chunk_static": 1.0, "chunk_dynamic": 2.0, "split_even": 1.0, "split_fixed": 3.0}
EVEN, UNEVEN = [[0.5, 0.5]], [[0.25, 0.75]]


class Serving(unittest.TestCase):
    def test_pages_by_hand(self):
        full, uniform, ragged = (simulate.system(kind, COSTS, UNEVEN, 1) for kind in ("full", "uniform", "ragged"))
        self.assertEqual(full.pages(100), 7)          # 2 heads share pages of 16 tokens
        self.assertEqual(uniform.pages(100), 4)       # 50 of each
        self.assertEqual(simulate.system("reserved", COSTS, UNEVEN, 1).pages(100), 5)  # as the longer head needs: 75
        self.assertEqual(ragged.pages(100), 2 + 5)    # of one head each
        self.assertEqual(ragged.page_bytes(), 16 * 1000)
        self.assertEqual(full.page_bytes(), 2 * 16 * 1000)
        # A prompt of 5,000: the second chunk raw beside half of the first; the last, shorter one beside more.
        self.assertEqual(uniform.most_of_prompt(5000), max(-(-(1024 + 2048) // 16), -(-(2048 + 904) // 16)))
        self.assertEqual(uniform.most_of_prompt(2000), -(-2000 // 16))

    def test_one_request_by_hand(self):
        found = simulate.serve("full", COSTS, EVEN, [(0.0, 3000, 4)], 1e9)
        # Chunks of 2,048 and 952 tokens; 4 steps over 3,000 to 3,003 tokens of 2 heads.
        prompt, steps = 3.0, 4 * 1.0 + 2 * 1e3 * (3000 + 3001 + 3002 + 3003) / 1e6
        self.assertAlmostEqual(found["first_token_ms"]["mean"], prompt)
        self.assertAlmostEqual(found["seconds"] * 1e3, prompt + steps)
        self.assertEqual(found["preemptions"], 0)

    def test_judging_and_uneven_splits_cost_what_they_cost(self):
        times = {kind: simulate.serve(kind, COSTS, UNEVEN, [(0.0, 2000, 1)], 1e9) for kind in simulate.SYSTEMS}
        self.assertAlmostEqual(times["dynamic"]["first_token_ms"]["mean"], 2 * times["full"]["first_token_ms"]["mean"])
        step = {kind: found["seconds"] * 1e3 - found["first_token_ms"]["mean"] for kind, found in times.items()}
        self.assertAlmostEqual(step["full"], 1 + 4)
        self.assertAlmostEqual(step["uniform"], 1 + 2)
        self.assertAlmostEqual(step["balanced"], 1 + 2)
        self.assertAlmostEqual(step["ragged"], 1 + 3 * 2)

    def test_random_servings_answer_everything_and_only_the_unreserved_are_put_back_in_a_prompt(self):
        rng = random.Random(7)
        put_back = 0
        for case in range(40):
            requests = [(rng.uniform(0, 500), rng.randint(10, 6000), rng.randint(1, 80)) for _ in range(12)]
            memory = rng.uniform(14e6, 40e6)
            for kind in simulate.SYSTEMS:
                found = simulate.serve(kind, COSTS, UNEVEN, requests, memory, 1)
                answers = sum(answer for _, _, answer in requests)
                self.assertAlmostEqual(found["tokens_per_s"] * found["seconds"], answers, msg=f"{case} {kind}")
                self.assertGreaterEqual(found["first_token_ms"]["mean"], 0)
                put_back += found["preemptions"] if kind == "dynamic" else 0
        self.assertGreater(put_back, 0)

    def test_more_memory_holds_more_requests(self):
        requests = simulate.draw("long", 20, 3)
        for kind in simulate.SYSTEMS:
            small, large = (simulate.saturated(kind, COSTS, UNEVEN, requests, memory) for memory in (5e9, 1e10))
            self.assertGreater(small["batch"], 0)
            self.assertLess(small["batch"], large["batch"])

    def test_costs_come_from_a_record_by_hand(self):
        base = {"model": {"layers": 2, "q_heads": 1, "kv_heads": 1, "head_dim": 1, "parameters": 1e9}, "token_bytes_of_head": 1000,
                "step_ms": {"1": 9.0}, "chunk_static": 9.0, "chunk_dynamic": 2.0, "split_even": 9.0, "prefill_attention_tflops": 1e12,
                "sources": {"chunk_dynamic": "a paper"}}
        figures = {"decode/B4/128K": 4 * 131.072, "decode/B1/128K": 500.0, "chunks/32K/tangram": 3000.0, "chunks/32K/given": 1000.0,
                   "ragged/calibrated/B16": 11.0, "ragged/calibrated/B16_evened": 10.0,
                   "ragged/log_normal/B16/fixed_split": 19.0, "ragged/log_normal/B16_evened": 10.0}
        record = {"figures": {name: {"us": us} for name, us in figures.items()},
                  "decode_step": {"benchmarks": [{"name": "full/131072", "real_time": 5.0}]},
                  "decode_step_batch": {"benchmarks": [{"name": "full/131072/B4", "real_time": 6.0},
                                                       {"name": "full/262144/B4", "real_time": 7.0, "extrapolated": True}]},
                  "decode_step_prompts": {"benchmarks": [{"name": "prompt/full/2048", "real_time": 40.96},
                                                         {"name": "prompt/full/32768", "real_time": 80.0}]}}
        made = costs.costs_of(record, base, "record")
        self.assertEqual(made["attention_gbs"], 1000.0)             # 4 sequences, 131,072 tokens of 1,000 bytes
        self.assertEqual(made["step_ms"], {"1": 4.0, "4": 4.951})   # 5 and 6 ms less two layers' attention
        self.assertEqual(made["chunk_static"], 1.05)                # two layers add 2 ms each to 80
        self.assertEqual(made["split_even"], 1.1)
        self.assertEqual(made["split_fixed"], 1.9)
        self.assertEqual(made["product_tflops"], 100)               # 2,048 tokens times 1e9 parameters in 40.96 ms
        self.assertEqual((made["chunk_dynamic"], made["sources"]["chunk_dynamic"]), (2.0, "a paper"))

    def test_a_prompt_that_never_fits_is_an_error(self):
        for kind in simulate.SYSTEMS:
            with self.assertRaises(SystemExit):
                simulate.serve(kind, COSTS, UNEVEN, [(0.0, 100_000, 10)], 1e6)


if __name__ == "__main__":
    unittest.main()
