#!/usr/bin/env python3
"""Decode steps of vLLM and of a server with tessera's settings, in one process and in turns, so that both see the same
machine. In the environment of test.sh, with operators built:

    VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive \\
      python examples/integrations/vllm/measure_steps.py '{"mode": "read", "method": "quest", "budget": 256}'

Eight prompts of 3,900 to 4,000 tokens come at once; a step is one in which all eight decode. Prints the median and the
least of wall and of CPU time, and how many answers have their document's needle.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "tests"))
import conftest  # noqa: E402  the tests' engines and documents


def answers_begin(engine, count):
    """Steps until every request has the first token of its answer."""
    while True:
        requests = engine.scheduler.requests.values()
        if len(requests) == count and all(request.num_output_tokens >= 1 for request in requests):
            return
        engine.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=json.loads, help="tessera's settings, as JSON")
    parser.add_argument("--steps", type=int, default=70)
    given = parser.parse_args()
    torch.set_num_threads(1)
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(conftest.MODEL)
    documents = [conftest.document(tokenizer, 3900 + 14 * number, number) for number in range(8)]
    engines = {"vLLM": conftest.Engine(str(conftest.MODEL), None),
               json.dumps(given.settings): conftest.Engine(str(conftest.MODEL), given.settings)}
    for engine in engines.values():
        for number, document in enumerate(documents):
            engine.add(str(number), document[0], given.steps + 30)
        answers_begin(engine, len(documents))
    wall, cpu = ({name: [] for name in engines} for _ in range(2))
    for _ in range(given.steps):
        for name, engine in engines.items():
            begin, began = time.perf_counter(), time.process_time()
            engine.step()
            wall[name].append(1e3 * (time.perf_counter() - begin))
            cpu[name].append(1e3 * (time.process_time() - began))
    for name, engine in engines.items():
        while engine.engine.has_unfinished_requests():
            engine.step()
        right = sum(document[1] in engine.outputs[str(number)].outputs[0].text for number, document in enumerate(documents))
        print(f"{name}: {statistics.median(wall[name]):.1f} ms a step, the least {min(wall[name]):.1f}; CPU time "
              f"{statistics.median(cpu[name]):.1f} and {min(cpu[name]):.1f}; {right} of 8 right")
    first, second = (statistics.median(times) for times in wall.values())
    print(f"{first / second:.2f} times vLLM's")


if __name__ == "__main__":
    main()
