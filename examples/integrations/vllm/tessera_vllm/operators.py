"""Tessera's operators for an engine's process: made beforehand by build.py, and never compiled here."""
import functools
import importlib.util
import pathlib
import sys
import warnings

from . import plan
from . import settings as asking

HERE = pathlib.Path(__file__).resolve().parent
CARRIED = HERE / "carried"                 # in a wheel: tessera_torch with the headers, as this package was made with
REPOSITORY = HERE.parents[1] / "pytorch"   # its folder beside this one


def package():
    """tessera_torch: what a wheel carries, else as it is installed, else from the repository."""
    if CARRIED.exists():
        if str(CARRIED) not in sys.path:
            sys.path.insert(0, str(CARRIED))
    elif importlib.util.find_spec("tessera_torch") is None:
        sys.path.append(str(REPOSITORY))
    with warnings.catch_warnings():
        # Of the version of transformers: nothing is asked of its caches here.
        warnings.filterwarnings("ignore", message="transformers is ")
        import tessera_torch
        import tessera_torch.virtual_pages
    return tessera_torch


SMALLEST_BUDGET = 16  # of a method that estimates


class Model:
    """What the operators must know of a model, of vLLM's model_config."""

    def __init__(self, vllm_config):
        config, parallel = vllm_config.model_config, vllm_config.parallel_config
        self.path = config.model
        self.layers = config.get_num_layers(parallel)
        self.q_heads = config.get_num_attention_heads(parallel)
        self.kv_heads = config.get_num_kv_heads(parallel)
        self.dim = config.get_head_size()
        self.dtype = config.dtype
        self.block = vllm_config.cache_config.block_size
        self.config = config.hf_text_config

    def heads(self):
        return self.q_heads, self.kv_heads, self.dim

    def rope_frequencies(self):
        """How RoPE turns queries; ValueError where it is not known, or not one rule for all layers and whole heads."""
        package()
        from tessera_torch.facts import rope
        rope.check_places(self.config)
        turn, *others = {rope.turn_of(self.config, layer) for layer in range(self.layers)}
        if others or turn.order_of(self.dim) is not None:
            raise asking.refused("how RoPE turns queries", "another rule in some layers" if others else
                                 f"{turn.pairs} of {2 * len(turn.speeds)} of a head's {self.dim} elements",
                                 "halves of a whole head in every layer", "take a method that does not turn queries back")
        return turn.speeds_of(self.dim)


class Operators:
    """PageOperations of one method and model, whatever the budgets of requests: pages(scale, softcap) of attention; of
    a method that chooses what steps read, reading(scale, softcap, reads); and the schedules of requests."""

    def __init__(self, settings, model):
        self.settings, self.model = settings, model
        self.pages = functools.lru_cache(maxsize=64)(self._open)

    def schedule(self, own, prompt, block):
        """A request's schedule. own: its settings. Errors: ValueError for a budget that the method does not take."""
        if not own.planned or own.mode == "off":
            return plan.schedule_of(own, prompt, block)
        # Of a method without a first stage the budget says what is read, which is half of what the method takes.
        budget = own.budget if own.drops else 2 * block * plan.blocks_for(own.budget, block)
        return plan.schedule_of(own, prompt, block, self.pages().plan(prompt, budget))

    def reading(self, scale, softcap, reads):
        """Operations by which a step may read so many tokens, or more."""
        return self.pages(scale, softcap, 1 << (max(reads, self.model.block) - 1).bit_length())

    def _open(self, scale=0.0, softcap=0.0, reads=0):
        model, named = self.model, dict(self.settings.parameters)
        budget = None if self.settings.profile else max(self.settings.budget, self.settings.window)
        if self.settings.reads:
            named = {"page": model.block, **named, "newest": 0}  # a step reads the newest block beside its choice
            if self.settings.planned:
                named["unit"] = "page"
            # The method reads half of its budget; the other half stands for its estimate.
            budget = max(SMALLEST_BUDGET, 2 * (reads or model.block))
        if self.settings.observes == "statistics":
            named["rope_frequencies"] = model.rope_frequencies()
        torch_package = package()
        torch_package.build.MAY_COMPILE = False
        try:
            return torch_package.PageOperations(
                self.settings.method, layers=model.layers, q_heads=model.q_heads, kv_heads=model.kv_heads,
                dim=model.dim, dtype=model.dtype, scale=scale, softcap=softcap, profile=self.settings.profile or None,
                budget=budget, **named)
        except FileNotFoundError as error:
            command = (f"python -m tessera_vllm.build --model {model.path} --methods {self.settings.method} "
                       f"--dtype {str(model.dtype).removeprefix('torch.')}")
            raise ValueError(f"tessera: the operators of {self.settings.method} for this model are not built; expected "
                             f"them in the folder of libraries; run: {command}") from error

    def try_out(self, block):
        """Chooses among random rows as a prompt's end or a step would: the settings are right, and heads keep or read
        as many tokens as their blocks have. Errors: ValueError of one sentence."""
        if self.settings.planned:
            self.schedule(self.settings, block, block)
            # Whatever the budgets of requests, the window's own tokens fit into what stays.
            self.pages().plan(max(1, self.settings.window), SMALLEST_BUDGET)
        if self.settings.reads:
            self._try_to_read(block)
        if self.settings.drops:
            self._try_to_keep(block)

    def _try_to_read(self, block):
        import torch
        model, pages = self.model, self.reading(0.0, 0.0, 2 * block)
        if pages.index_page != block:
            raise asking.refused("page", pages.index_page, f"{block}, the block of vLLM", "leave it out: vLLM's kernel "
                                 "reads whole blocks")
        random = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(shape, generator=random).to(model.dtype)
        tokens, number = 5 * block, lambda value: torch.tensor([value], dtype=torch.int32)
        k, v = draw(5, block, model.kv_heads, model.dim), draw(5, block, model.kv_heads, model.dim)
        layer = package().PagedLayer(k, v, torch.arange(5, dtype=torch.int32)[None],
                                     torch.full((1, model.kv_heads), tokens, dtype=torch.int32))
        index = pages.empty_index(layer)
        pages.index_pages(layer, index)
        for number_of_layer in range(model.layers):
            _, counts = pages.choose_to_read(number_of_layer, layer, index, draw(1, 1, model.q_heads, model.dim),
                                             number(tokens), number(2 * block))
            if not bool((counts == 2 * block).all()):
                raise asking.refused(f"what {self.settings.method} reads in layer {number_of_layer}",
                                     counts.tolist()[0], f"{2 * block} tokens of every kv_head",
                                     "leave out parameters that make heads unequal")

    def _try_to_keep(self, block):
        import torch
        model, uneven = self.model, self.settings.uneven
        shape, profile = (model.layers, model.kv_heads), self.settings.profile
        if profile and (len(profile), len(profile[0])) != shape:
            raise asking.refused("layers and kv_heads of the profile", (len(profile), len(profile[0])),
                                 f"{shape}, as the model has", "make one for this model by `tessera calibrate`")
        tokens = (plan.blocks_for(max(self.settings.budget, self.settings.window), block) + 2) * block
        kept_blocks, queries = plan.kept_blocks(self.settings, tokens, block), max(1, self.settings.window)
        random = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(shape, generator=random).to(model.dtype)
        k, v = draw(1, tokens, model.kv_heads, model.dim), draw(1, tokens, model.kv_heads, model.dim)
        heads = (1, model.kv_heads)
        layer = package().PagedLayer(k, v, torch.zeros(1, 1, dtype=torch.int32),
                                     torch.full(heads, tokens, dtype=torch.int32),
                                     torch.arange(tokens, dtype=torch.int32).expand(*heads, tokens).contiguous())
        first = torch.tensor([tokens - queries], dtype=torch.int32)
        pages = self.pages()
        if pages.observes != self.settings.observes:
            raise asking.refused(f"what {self.settings.method} observes", pages.observes, self.settings.observes,
                                 "this is an error of tessera_vllm: please report it")
        sums = pages.statistics(1) if self.settings.observes == "statistics" else None
        layer = layer._replace(scores=torch.zeros(*heads, tokens))
        for index in range(model.layers):
            q = draw(1, queries, model.q_heads, model.dim)
            pages.observe(index, layer, q, first, statistics=sums)
            budgets = torch.tensor([kept_blocks * block], dtype=torch.int32)
            _, counts = pages.choose(index, layer, q, first, budgets=budgets, granularity=block if uneven else 1,
                                     statistics=sums)
            if uneven and int(counts.sum()) > kept_blocks * block * model.kv_heads:
                raise asking.refused(f"what {self.settings.method} keeps in layer {index}", counts.tolist()[0],
                                     f"{kept_blocks * block} tokens of a kv_head on average",
                                     "leave out parameters that make layers unequal")
            if not uneven and not bool((counts == kept_blocks * block).all()):
                raise asking.refused(f"what {self.settings.method} keeps in layer {index}", counts.tolist()[0],
                                     f"{kept_blocks * block} tokens of every kv_head, as in vLLM's tables all have one "
                                     "length", "leave out parameters that make layers or heads unequal")
