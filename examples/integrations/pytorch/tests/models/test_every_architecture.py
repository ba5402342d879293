"""Every causal architecture of the installed transformers: right with a TesseraCache, or refused in a sentence.

Tiny random models. `full`, and `snapkv` and `expected_attention` with a budget for everything, give eager attention's logits in prompt
and steps. With a quarter of the tokens, the kept positions are a double oracle's, and steps are eager attention masked to them. There is
no third outcome.

    pytest tests/models --models-table MODELS.md     writes the section of the installed transformers anew
"""
import functools
import pathlib
import traceback

import models_table
import oracles
import pytest
import tessera_torch
import tiny_models
import torch
import transformers
from oracles import RECORD
from tessera_torch import TesseraCache
from tessera_torch.generation import cache_keyword

PROMPT, STEPS, QUARTER, WINDOW, FUTURE = 96, 4, 24, 8, 24
MEASURED = (0, 1, 8, 64, 37, PROMPT + FUTURE - 1)  # positions; a turn by others follows from 1, 8 and 64, and is compared at the last two
METHODS = {"full": {}, "snapkv": dict(window=WINDOW), "expected_attention": dict(future=FUTURE)}
NOTHING = "the model never gives the cache anything, and its logits are right"
OURS = str(pathlib.Path(tessera_torch.__file__).parent)
IDS = torch.randint(3, tiny_models.VOCABULARY, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(5))


class Refused(Exception):
    """A sentence of tessera_torch or the library, before anything was stored."""


def refusal(error, cache=None):
    """What the error says, if it is a refusal."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = frames and (frames[-1].filename.startswith(OURS) or "tessera" in str(frames[-1].line) or "_ops.py" in frames[-1].filename)
    if ours and (isinstance(error, NotImplementedError) or isinstance(error, ValueError) and "; expected" in str(error)):
        assert cache is None or (cache.tokens, cache.bytes()) == (0, 0), f"stored something and refused: {error}"
        return Refused(str(error))
    return error


def run(model, cache):
    """Logits of the prompt and of each step."""
    named = {} if cache is None else {cache_keyword(model): cache}
    with torch.no_grad():
        result = model(IDS[:, :PROMPT], use_cache=True, **named)
        logits = [result.logits]
        for step in range(PROMPT, PROMPT + STEPS):
            past = cache if cache is not None else result.get("cache", result.get("past_key_values"))
            result = model(IDS[:, step:step + 1], use_cache=True, **{cache_keyword(model): past})
            logits.append(result.logits[:, -1:])
    return torch.cat([part.float() for part in logits], 1)


def apart(got, want):
    return ((got - want).norm() / want.norm()).item()


class Model:
    """One architecture under the attentions "eager", "tessera" and "oracle", with the same weights."""

    def __init__(self, kind):
        self.kind = kind
        self.eager = self._under("eager")
        tiny_models.randomise(self.eager)
        try:
            self.ours = self._under("tessera")
        except Exception as error:  # transformers' own: the architecture takes no attention from outside
            raise self._without_interface(error)
        self.oracle = self._under("oracle")
        RECORD.watch(self.oracle)
        for other in (self.ours, self.oracle):
            other.load_state_dict(self.eager.state_dict())

    def _under(self, attention):
        torch.manual_seed(1)
        return transformers.AutoModelForCausalLM.from_config(tiny_models.config_of(self.kind), attn_implementation=attention).eval()

    def _without_interface(self, error):
        """Then a cache for the model as it can be made is refused."""
        try:
            TesseraCache(self.eager.config)
        except ValueError as refused:
            return refusal(refused)
        return error

    @functools.cached_property
    def want(self):
        return run(self.eager, None)

    def cache(self, method, budget):
        try:
            return TesseraCache(self.ours.config, method, budget, **METHODS[method])
        except Exception as error:
            raise refusal(error)

    def run_ours(self, method, budget=None):
        cache = self.cache(method, budget)
        try:
            with torch.no_grad():
                prompt = self.ours(IDS[:, :PROMPT], use_cache=True, **{cache_keyword(self.ours): cache})
        except Exception as error:
            raise refusal(error, cache)
        logits = [prompt.logits]
        cache.end_prompt()
        kept = [kept for layer in range(cache.layer_count) if (kept := cache.kept_positions(layer))]
        with torch.no_grad():
            for step in range(PROMPT, PROMPT + STEPS):
                logits.append(self.ours(IDS[:, step:step + 1], use_cache=True, **{cache_keyword(self.ours): cache}).logits[:, -1:])
        self.keeps_something = cache.get_seq_length() > 0
        return torch.cat([part.float() for part in logits], 1), kept

    def recorded(self):
        """The layers of a prompt under the oracle."""
        with torch.no_grad():
            self.oracle(IDS[:, :PROMPT], use_cache=False)
        return list(RECORD.layers)

    def turns(self, layers):
        """Of each layer: [tokens, dim, dim] that takes queries to what they are at position 0, and [dim, dim] that takes those to
        their mean over the positions behind the prompt. Measured at positions of MEASURED: under an attention of zeros a query depends
        on its token and, by RoPE alone, on its position. None where that is no turn."""
        needed = max(-(-3 * layer["q"].shape[-1] // (2 * layer["q"].shape[1])) for layer in layers)  # more queries than elements
        ids = torch.arange(3, 3 + needed).repeat_interleave(len(MEASURED))[:, None]
        positions = torch.tensor(MEASURED).repeat(needed)[:, None]
        RECORD.makes_nothing = True
        try:
            with torch.no_grad():
                self.oracle(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            RECORD.makes_nothing = False
        result = []
        for layer in RECORD.layers:
            q = layer["q"][:, :, 0].double().unflatten(0, (needed, len(MEASURED))).permute(1, 0, 2, 3).flatten(1, 2)
            at = {position: rows for position, rows in zip(MEASURED, q)}
            steps = {position: torch.linalg.lstsq(at[0], at[position]).solution for position in (1, 8, 64)}
            power = lambda t: (torch.linalg.matrix_power(steps[64], t // 64) @ torch.linalg.matrix_power(steps[8], t % 64 // 8) @
                               torch.linalg.matrix_power(steps[1], t % 8))
            fits = all((at[0] @ power(t) - at[t]).norm() < 1e-4 * at[t].norm() for t in MEASURED)
            back = torch.stack([torch.linalg.inv(power(t)) for t in range(PROMPT)]) if fits else None
            mean = torch.stack([power(t) for t in range(PROMPT, PROMPT + FUTURE)]).mean(0)
            result.append((back, mean) if fits else None)
        return result


def check_quarter(model, method):
    """Kept positions, and steps over them."""
    got, kept = model.run_ours(method, QUARTER)
    layers = model.recorded()
    turns = model.turns(layers) if method == "expected_attention" else None
    visible, stored = {}, iter(kept)
    for i, layer in enumerate(layers):
        if layer["owner"] != i:
            continue
        own = next(stored)
        if layer["slides"]:
            continue
        turn = turns and turns[i]
        assert not turns or turn is not None, f"layer {i} does not turn its queries, and {method} is not refused"
        for row in range(len(IDS)):
            scores = (oracles.snapkv_scores(layer, row, WINDOW) if turn is None else
                      oracles.expected_scores(layer, row, *turn))
            wrong = oracles.wrong_positions(own[row], scores, QUARTER, 1e-4)
            assert wrong is None, f"{method}, layer {i}, sequence {row}: {wrong}"
        rows = torch.zeros(len(IDS), layer["key"].shape[1], PROMPT + STEPS, dtype=torch.bool)
        rows[..., PROMPT:] = True
        for row, heads in enumerate(own):
            for head, positions in enumerate(heads):
                rows[row, head, positions.long()] = True
        visible[i] = rows
    RECORD.visible = visible
    try:
        want = run(model.oracle, None)
    finally:
        RECORD.visible = {}
    assert (error := apart(got[:, PROMPT:], want[:, PROMPT:])) < 1e-4, f"{method}, steps over what is kept: {error:.1e} from eager"


def outcome_of(kind):
    """{method: "right" or a sentence}; one entry where it is the same for every method: "model", refused; "no cache", not used."""
    try:
        model = Model(kind)
    except Refused as refused:
        return {"model": str(refused)}
    outcome = {}
    for method in METHODS:
        try:
            got, _ = model.run_ours(method, None if method == "full" else 2 * PROMPT)
            error = apart(got, model.want)
            assert error < 1e-4, f"{method}: {error:.1e} from eager attention"
            if not model.keeps_something:
                return {"no cache": NOTHING}
            if method != "full":
                check_quarter(model, method)
            outcome[method] = "right"
        except Refused as refused:
            if method == "full":
                return {"model": str(refused)}
            outcome[method] = str(refused)
    return outcome


@pytest.fixture(scope="module")
def outcomes(request):
    """Of each architecture that has been tested; at the end they are printed, and written where --models-table says."""
    made = {}
    yield made
    text = models_table.section(made)
    print(text)
    if path := request.config.getoption("models_table"):
        models_table.write(pathlib.Path(path), text)


@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_an_architecture_is_right_or_refused(kind, outcomes):
    if kind in tiny_models.NOT_MADE:
        assert tiny_models.fails_to_be_made(kind), f"a tiny {kind} can be made; test it"
        outcomes[kind] = {"not made": tiny_models.NOT_MADE[kind]}
    else:
        outcomes[kind] = outcome_of(kind)


def test_enough_architectures_are_right(outcomes):
    """Of all of them, after all of them; where some are selected there is nothing to count."""
    if set(tiny_models.ARCHITECTURES) <= set(outcomes):
        right = {kind for kind, outcome in outcomes.items() if set(outcome.values()) == {"right"}}
        assert len(right) >= 40 and {"deepseek_v3", "smollm3"} <= right
        if not transformers.__version__.startswith("4."):
            assert {"gemma4_text", "qwen3_5_text"} <= right
