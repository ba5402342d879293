"""The shipped model, documents with a needle, and engines that a test can look into."""
import contextlib
import gc
import json
import math
import os
import pathlib
import random

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[4]
MODEL = ROOT / "examples" / "model"
# An engine in the test's own process: its scheduler and its pool can be looked at.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

TASKS = json.loads((ROOT / "examples" / "data" / "tasks.json").read_text())
TEXT = (ROOT / "examples" / "data" / "opticks.txt").read_text()
BLOCK = 32


@pytest.fixture(scope="session")
def model():
    """The shipped model."""
    return str(MODEL)


@pytest.fixture(scope="session")
def tokenizer(model):
    import transformers
    return transformers.AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def reference(model):
    from reference import Reference
    return Reference(model)


def asking(mode, **more):
    """A server's settings."""
    method = {"uneven": "ada_snapkv", "read": "quest", "compact_and_read": "rocketkv"}.get(mode, "snapkv")
    return {"mode": mode, "method": method, **more}


def kept_of(prompt, budget, max_new=128):
    """What RocketKV's first stage keeps of a long prompt, by its paper's section 3.6."""
    size, ratio = prompt + max_new, (prompt + max_new) / budget
    return math.floor(size / ratio ** min(0.2 + 0.06 * math.log2(ratio), 0.8)) - max_new


def document(tokenizer, tokens, number, asked=None):
    """A prompt of about so many tokens with a needle, and the answer; of another `number` another text. asked: of
    which needle's name it asks in place of its own."""
    draw = random.Random(number)
    name = f"{draw.choice(TASKS['adjectives'])} {draw.choice(TASKS['nouns'])}"
    first = draw.randrange(len(TASKS["words"]) - TASKS["value_words"])
    value = " ".join(TASKS["words"][first:first + TASKS["value_words"]])
    ask = "\n" + TASKS["question"].format(question=TASKS["ask_one"].format(name=asked or name)) + TASKS["answer"]
    ending = tokenizer.encode(ask, add_special_tokens=False)
    needle = tokenizer.encode("\n" + TASKS["needle"].format(name=name, value=value) + "\n", add_special_tokens=False)
    begin = draw.randrange(len(TEXT) - 10 * tokens)
    body = tokenizer.encode(TEXT[begin:begin + 10 * tokens], add_special_tokens=False)
    body = body[:max(0, tokens - 1 - len(needle) - len(ending))]
    place = draw.randrange(len(body) // 8, max(1, len(body) // 2) + 1)
    return [1] + body[:place] + needle + body[place:] + ending, value


class Engine:
    """vLLM with a model and, if it is given, tessera's settings; step by step."""

    def __init__(self, model, tessera=None, **options):
        from vllm import LLM
        options = {"dtype": "bfloat16", "max_num_batched_tokens": 1024, "max_num_seqs": 8, "max_model_len": 8192,
                   "enable_prefix_caching": False, **options}
        if tessera is not None:
            options = {"worker_cls": "tessera_vllm.worker.Worker", "scheduler_cls": "tessera_vllm.scheduler.Scheduler",
                       "additional_config": {"tessera": tessera}, **options}
        self.llm = LLM(model=model, enforce_eager=True, **{"block_size": BLOCK, **options})
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.outputs, self.preemptions, self.most_held = {}, 0, 0

    def add(self, name, prompt, new=16, extra=None, **params):
        from vllm import SamplingParams
        params = {"temperature": 0, "max_tokens": new, "ignore_eos": True, **params}
        self.engine.add_request(name, {"prompt_token_ids": prompt},
                                SamplingParams(extra_args={"tessera": extra} if extra is not None else None, **params))

    def step(self):
        before = {name: request.num_preemptions for name, request in self.scheduler.requests.items()}
        for output in self.engine.step():
            if output.finished:
                self.outputs[output.request_id] = output
        self.preemptions += sum(request.num_preemptions > before.get(name, 0)
                                for name, request in self.scheduler.requests.items())
        self.most_held = max(self.most_held, self.held())

    def run(self, prompts, new=16, extras=None, **params):
        """Outputs of these prompts, which come together."""
        names = [f"{len(self.outputs)}-{number}" for number in range(len(prompts))]
        for number, prompt in enumerate(prompts):
            self.add(names[number], prompt, new, extras[number] if extras else None, **params)
        while self.engine.has_unfinished_requests():
            self.step()
        return [self.outputs[name] for name in names]

    def tokens(self, prompts, new=16, extras=None, **params):
        return [list(output.outputs[0].token_ids) for output in self.run(prompts, new, extras, **params)]

    def held(self):
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def caches(self):
        return self.runner.kv_caches

    def state(self):
        """What the worker keeps of requests."""
        from tessera_vllm import worker
        return worker.active.requests

    def close(self):
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        del self.llm, self.engine, self.core, self.scheduler, self.pool, self.manager, self.runner
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def engine(model):
    @contextlib.contextmanager
    def opened(tessera=None, **options):
        made = Engine(model, tessera, **options)
        try:
            yield made
        finally:
            made.close()
    return opened
