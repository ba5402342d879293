"""An engine in a process of its own, and what is refused: by one sentence, before the model is loaded, or for one
request."""
import os
import subprocess
import sys

import pytest
from conftest import document

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    llm = LLM(model=sys.argv[2], block_size=32, enforce_eager=True, max_model_len=4096, **asked["options"])
    answers = []
    for prompts, extra in asked["calls"]:
        try:
            params = SamplingParams(temperature=0, max_tokens=8, extra_args=extra)
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            answers.append([output.outputs[0].text for output in outputs])
        except Exception as error:
            answers.append(str(error))
    print("ANSWERS " + json.dumps(answers))
"""
CLASSES = {"worker_cls": "tessera_vllm.worker.Worker", "scheduler_cls": "tessera_vllm.scheduler.Scheduler"}


def ask(tmp_path, model, options, calls=(), multiprocessing="1", environment=()):
    """(answers by call, all that was said)."""
    import json
    (tmp_path / "asks.py").write_text(SCRIPT)
    asked = json.dumps({"options": options, "calls": calls})
    done = subprocess.run([sys.executable, tmp_path / "asks.py", asked, model], capture_output=True, text=True,
                          check=False,
                          env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing, **dict(environment)})
    said = done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return json.loads(found[0].removeprefix("ANSWERS ")) if found else None, said


def test_an_engine_process_of_its_own_answers_and_a_wrong_request_fails_alone(tmp_path, model, tokenizer):
    documents = [document(tokenizer, 1500, number) for number in range(3)]
    prompts = [prompt for prompt, _ in documents]
    figures = tmp_path / "figures.jsonl"
    options = {**CLASSES, "additional_config": {"tessera": {"budget": 256, "figures": str(figures)}}}
    calls = [(prompts, None), (prompts[:1], {"tessera": {"budget": -1}}),
             (prompts[:1], {"tessera": {"method": "keydiff"}}), (prompts[1:2], {"tessera": {"mode": "off"}})]
    answers, said = ask(tmp_path, model, options, calls)
    assert answers is not None, said
    assert sum(value in text for text, (_, value) in zip(answers[0], documents)) >= 2
    assert "budget is -1; expected a whole number from 1" in answers[1]
    assert "is 'method'; expected budget, chunk, mode" in answers[2]
    assert isinstance(answers[3], list)
    lines = figures.read_text().splitlines()
    assert len(lines) == 4 and '"blocks_freed": 38' in lines[0] and '"blocks_freed": 0' in lines[3]


def test_an_engine_without_settings_is_vllms_own_also_behind_one_that_had_them(engine, tokenizer):
    from tessera_vllm import blocks, worker
    prompt, _ = document(tokenizer, 1000, 1)
    with engine({"budget": 128}) as ours:
        assert isinstance(ours.manager, blocks.CompactedManager)
        ours.run([prompt])
        assert ours.state().compactions == 1
    with engine() as own:
        assert not isinstance(own.manager, blocks.CompactedManager) and worker.active is None
        own.add("whole", prompt, 16)
        for _ in range(6):
            own.step()
        assert own.held() == 32  # 1,000 tokens and a few, in blocks of 32
    with engine({"budget": 128}) as ours:
        assert isinstance(ours.manager, blocks.CompactedManager)


BUDGET = {"tessera": {"budget": 256}}
READ = {"mode": "read", "method": "quest"}
STAGED = {"mode": "compact_and_read", "method": "rocketkv"}


@pytest.mark.parametrize("options, said", [
    ({**CLASSES, "additional_config": {"tessera": {"method": "kvzip"}}},
     "tessera: method is 'kvzip'; expected ada_snapkv, chunkkv"),
    ({**CLASSES, "additional_config": {"tessera": {"mode": "read"}}}, "tessera: method is 'snapkv' in the mode 'read'"),
    ({**CLASSES, "additional_config": {"tessera": {**READ, "parameters": {"page": 16}}}},
     "tessera: page is 16; expected 32, the block of vLLM"),
    ({**CLASSES, "additional_config": {"tessera": {**READ, "parameters": {"page": 48}}}},
     "tessera: page is 48; expected 32, the block of vLLM"),
    ({**CLASSES, "additional_config": {"tessera": {**READ, "parameters": {"newest": 0}}}},
     "tessera: newest is 0; expected none; leave it out"),
    ({**CLASSES, "additional_config": {"tessera": {**READ, "method": "rocketkv"}}},
     "tessera: method is 'rocketkv' in the mode 'read'; expected hsa, quest"),
    ({**CLASSES, "additional_config": {"tessera": {**STAGED, "budget": 15}}}, "budget is 15; expected 16 to"),
    ({**CLASSES, "additional_config": {"tessera": {**STAGED, "parameters": {"max_new": 8}}}},
     "max_new is 8; expected a number that leaves room for the window of 32 tokens"),
    ({**CLASSES, "additional_config": {"tessera": {"method": "ada_snapkv"}}},
     "tessera: method is 'ada_snapkv' in the mode 'compact'"),
    ({**CLASSES, "additional_config": {"tessera": {"parameters": {"windw": 3}}}},
     "parameter is 'windw'; expected window"),
    ({**CLASSES, "additional_config": {"tessera": {"parameters": {"dense_layers": 2}}}},
     "tessera: dense_layers is 2; expected 0"),
    (CLASSES, "tessera: additional_config is without the key tessera"),
    ({"worker_cls": CLASSES["worker_cls"], "additional_config": BUDGET}, "tessera: scheduler_cls is None"),
    ({"scheduler_cls": CLASSES["scheduler_cls"], "additional_config": BUDGET}, "tessera: worker_cls is"),
    ({"additional_config": BUDGET}, "tessera: worker_cls is"),
    ({**CLASSES, "additional_config": BUDGET, "kv_cache_dtype": "fp8"}, "tessera: kv_cache_dtype is 'fp8"),
    ({**CLASSES, "additional_config": BUDGET, "hf_overrides": {"sliding_window": 512}},
     "tessera: the model's layers is sliding"),
    ({**CLASSES, "additional_config": BUDGET, "dtype": "float16"}, "python -m tessera_vllm.build --model"),
])
def test_a_server_that_cannot_work_is_refused_when_it_starts(model, engine, options, said):
    from vllm import LLM
    with pytest.raises(Exception) as caught:
        LLM(model=model, block_size=32, enforce_eager=True, max_model_len=4096, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    cleanup_dist_env_and_memory()


def test_parallel_and_speculative_servers_and_connectors_are_refused():
    """Their engines cannot be started on this machine: the checks alone."""
    from types import SimpleNamespace as Names

    from tessera_vllm import refusals
    parallel = Names(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)
    config = Names(parallel_config=parallel, cache_config=Names(cache_dtype="auto"), speculative_config=None,
                   kv_transfer_config=None, use_v2_model_runner=False)
    refusals.check_engine(config)
    for change, said in (({"parallel_config": Names(tensor_parallel_size=2)}, "tensor_parallel_size is 2; expected 1"),
                         ({"use_v2_model_runner": True}, "the model runner is V2; expected V1"),
                         ({"parallel_config": Names(pipeline_parallel_size=2)}, "pipeline_parallel_size is 2"),
                         ({"speculative_config": Names(method="ngram")}, "speculative_config is 'ngram'"),
                         ({"kv_transfer_config": Names(kv_connector="LMCache")}, "kv_transfer_config is 'LMCache'")):
        with pytest.raises(ValueError) as caught:
            refusals.check_engine(Names(**{**vars(config), **change}))
        assert said in str(caught.value)


def test_the_model_runner_v2_is_refused(model, engine, monkeypatch):
    """vLLM itself refuses it without a Triton for the CPU, and then because of the package's logits processor."""
    from vllm import LLM
    from vllm.config import vllm as config
    options = {"model": model, "block_size": 32, "enforce_eager": True, "max_model_len": 4096, **CLASSES}
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="Model Runner V2 requires Triton"):
        LLM(**options, additional_config=BUDGET)
    monkeypatch.setattr(config, "HAS_TRITON", True)
    with pytest.raises(ValueError, match="tessera is not .* not supported by the V2 model runner|the model runner is V2"):
        LLM(**options, additional_config=BUDGET)
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    cleanup_dist_env_and_memory()


def test_other_models_are_refused():
    from types import SimpleNamespace as Names

    from tessera_vllm import refusals
    plain = {"runner_type": "generate", "is_encoder_decoder": False, "is_hybrid": False, "is_attention_free": False,
             "use_mla": False, "hf_text_config": Names(layer_types=None), "get_sliding_window": lambda: None}
    refusals.check_model(Names(**plain))
    sliding = Names(layer_types=["full_attention", "sliding_attention"])
    for change, said in (({"use_mla": True}, "MLA"), ({"runner_type": "pooling"}, "'pooling'"),
                         ({"is_hybrid": True}, "without"), ({"hf_text_config": sliding}, "sliding_attention"),
                         ({"get_sliding_window": lambda: 4096}, "window 4096")):
        with pytest.raises(ValueError) as caught:
            refusals.check_model(Names(**{**plain, **change}))
        assert said in str(caught.value)


def test_rope_that_a_method_cannot_turn_back_is_refused(model):
    """By expected_attention, which turns queries back."""
    import transformers
    from reference import ReferenceModel

    asked, known = transformers.AutoConfig.from_pretrained(model), object.__new__(ReferenceModel)
    known.config, known.dim, known.layers = asked, asked.head_dim, asked.num_hidden_layers
    theta = asked.rope_parameters["rope_theta"]
    assert known.rope_frequencies() == pytest.approx([theta ** (-2 * i / known.dim) for i in range(known.dim // 2)])
    asked.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match="how RoPE turns queries is halves of 32 of a head's 64 elements; expected"):
        known.rope_frequencies()
    del asked.rope_parameters["partial_rotary_factor"]
    asked.no_rope_layers = [1] * (known.layers - 1) + [0]
    with pytest.raises(ValueError, match="how RoPE turns queries is another rule in some layers; expected"):
        known.rope_frequencies()


def test_another_vllm_is_refused(monkeypatch):
    import vllm

    from tessera_vllm import names
    names.check()
    missing = ("vllm.v1.core.sched.scheduler", "Scheduler.no_such_name", ())
    monkeypatch.setattr(names, "NEEDED", (*names.NEEDED, missing))
    with pytest.raises(ValueError, match="Scheduler.no_such_name is missing; expected it as vLLM 0.32.0 has it"):
        names.check()
    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    with pytest.raises(ValueError, match="the version of vLLM is 0.33.1; expected 0.32.0"):
        names.check()


def test_a_server_that_does_not_load_the_plug_in_is_refused():
    import tessera_vllm
    from tessera_vllm import refusals
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    AttentionBackendEnum.CPU_ATTN.clear_override()
    with pytest.raises(ValueError, match="name tessera in VLLM_PLUGINS"):
        refusals.check_plugin()
    tessera_vllm.register()
    refusals.check_plugin()


def test_pages_that_no_stride_describes_are_refused(monkeypatch):
    from types import SimpleNamespace as Names

    import torch
    from tessera_vllm import refusals
    from vllm.v1.attention.backends import cpu_attn
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda **_: "neon")
    with pytest.raises(ValueError, match="is 'neon'; expected 'vec', 'vec16' or 'amx'"):
        refusals.check_pages(Names(cache_config=Names(block_size=32, cache_dtype="auto")),
                             Names(dtype=torch.bfloat16, dim=64))
