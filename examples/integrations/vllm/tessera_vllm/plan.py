"""Which blocks a request has given up, when its prompt is compacted, and what may be shared. Arithmetic alone: no vLLM.

The scheduler's process and the worker's both have a request's schedule from the same facts, so no message passes
between them. Where a prompt is compacted depends on positions only, and not on how its chunks met other requests: a
request that was preempted, or found a part of its prompt in the prefix cache, ends up with the same tokens.

A prompt is compacted at its ends: in the mode `compact` where it ends, in the mode `chunked` also at every multiple of
`chunk`. Methods that drop in each step have ends behind the prompt, too: wherever a block is full. At an end E, in
blocks of S tokens, each layer chooses M * S of the tokens that it stores in full blocks, moves them into the LAST M
full blocks before E, and the blocks before these are free: dropped(E) = E // S - M of them. What stands behind the last
full block stays where it is. A table stays indexed by a token's position, so slots of new tokens are the engine's own;
what attention reads is the table without its first `dropped` columns.

In the mode `uneven` the ends are those of `compact`, and M * S is what a kv_head keeps on average.

In the mode `read` there are no ends. Behind the prompt a token reads M blocks of its choice and the newest block. In the
mode `compact_and_read` the prompt's end is an end as in `compact`, and a token behind it reads so of what is stored. How
many blocks stay and how many are read follows from the prompt's length: the method's operators say it (operators.py).
"""
import dataclasses
import fractions
import math


def blocks_for(tokens, block):
    return -(-tokens // block)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """prompt:      tokens of the request's prompt, without what it has generated
    block:       tokens of a block
    kept_blocks: full blocks that stay of what is compacted
    chunk:       tokens between two ends; 0: the prompt's end alone
    window:      the newest queries before an end that its choice looks at
    every_query: every query of the prompt must be seen, so that none of it may come from a prefix cache
    every_block: behind the prompt each full block is an end
    uneven:      heads keep unequal numbers of blocks, in pages that only the worker knows (uneven.py)
    read_blocks: blocks that a token behind the prompt reads of each kv_head, the newest one among them; 0: all
    channels:    of a key that such a token chooses by; 0: the method's
    """
    prompt: int
    block: int
    kept_blocks: int
    chunk: int = 0
    window: int = 0
    every_query: bool = False
    every_block: bool = False
    uneven: bool = False
    read_blocks: int = 0
    channels: int = 0

    def last_end(self, position):
        """The last end at or before a position; 0: there was none."""
        if position >= self.prompt:
            return max(self.prompt, position // self.block * self.block) if self.every_block else self.prompt
        return position // self.chunk * self.chunk if self.chunk else 0

    def dropped(self, position):
        """Leading blocks that are free once so many tokens are stored and compacted."""
        return max(0, self.last_end(position) // self.block - self.kept_blocks)

    def compacts(self, position):
        """Whether something is dropped as soon as so many tokens are stored."""
        return position > 0 and self.dropped(position) > self.dropped(position - 1)

    def next_compaction(self, position):
        """The next position at which something is dropped, or None."""
        fewest = (self.kept_blocks + 1) * self.block  # before so many tokens no end drops anything
        if position >= self.prompt:
            return max((position // self.block + 1) * self.block, fewest) if self.every_block else None
        if self.chunk:
            end = max(position // self.chunk + 1, blocks_for(fewest, self.chunk)) * self.chunk
            while end < self.prompt:
                if self.compacts(end):
                    return end
                end += self.chunk
        return self.prompt if self.compacts(self.prompt) else self.next_compaction(self.prompt)

    def shared_blocks(self):
        """Leading blocks whose content is what the engine would have computed itself, and stays so; None: all blocks.

        Those that the first compaction frees. All others are overwritten, or computed from a compacted prompt. Where
        steps read a part: those in front of the first token that does.
        """
        first = self.next_compaction(0)
        if first is not None:
            return self.dropped(first)
        return self.first_reading(0) // self.block if self.read_blocks else None

    def longest_hit(self, tokens):
        """How many of these leading tokens may come from a prefix cache: what is overwritten must be nobody else's,
        and the queries that the first choice looks at must be computed."""
        first = self.next_compaction(0)
        if first is None:
            return tokens
        if self.every_query:
            return 0
        whole = min(self.dropped(first), max(0, first - self.window) // self.block)
        return min(tokens, whole * self.block)

    def first_reading(self, position):
        """The first position, at or behind this one, whose token reads a part of what is stored."""
        return max(position, self.prompt, (self.dropped(self.prompt) + self.read_blocks) * self.block)

    def tokens_read(self, position):
        """How many stored tokens the token at a position behind the prompt attends in a layer."""
        if self.read_blocks and position >= self.first_reading(position):
            return (self.read_blocks - 1) * self.block + position % self.block + 1
        return position + 1 - self.dropped(position) * self.block

    def blocks_before_first(self, tokens):
        """Blocks that a request of so many tokens holds when its first compaction is due, or at its end."""
        first = self.next_compaction(0)
        return blocks_for(tokens if first is None else min(first, tokens), self.block)

    def most_blocks_later(self, tokens):
        """The most blocks that it holds at any time behind its first compaction; 0: there is none."""
        most, begin = 0, self.next_compaction(0)
        while begin is not None and begin < tokens:
            end = self.next_compaction(begin) or tokens
            most = max(most, blocks_for(min(end, tokens), self.block) - self.dropped(begin))
            begin = None if end >= tokens else end
        return most


def kept_blocks(settings, prompt, block):
    """Blocks that stay of a prompt: as many as the layer needs that keeps most."""
    if not settings.profile:
        # A choice keeps at least the window's own tokens.
        return blocks_for(max(settings.budget, settings.window), block)
    full, window = prompt // block * block, blocks_for(settings.window, block) * block
    # Shares are decimals, as the method takes them.
    share = lambda number: math.ceil(fractions.Fraction(str(number)) * full)
    most = max(sum(min(full, max(window, share(number))) for number in layer) for layer in settings.profile)
    return max(1, blocks_for(most // block, len(settings.profile[0])))


def schedule_of(settings, prompt, block, stages=None):
    """A request's schedule from its settings. stages: what the method plans for the prompt, if it plans
    (Operators.schedule); it has kept, read and channels."""
    if settings.mode == "off":
        return Schedule(prompt, block, blocks_for(prompt, block))
    if stages is not None:
        read, channels = blocks_for(stages.read, block) + 1, stages.channels
        if settings.mode == "read":
            return Schedule(prompt, block, blocks_for(prompt, block), read_blocks=read, channels=channels)
        return Schedule(prompt, block, blocks_for(stages.kept, block), window=settings.window, read_blocks=read,
                        channels=channels)
    kept = kept_blocks(settings, prompt, block)
    if settings.mode == "read":
        return Schedule(prompt, block, blocks_for(prompt, block), read_blocks=kept + 1)
    # Every end shall have at least one full block more than the last.
    chunk = max(settings.chunk, block) if settings.mode == "chunked" else 0
    return Schedule(prompt, block, kept, chunk, settings.window, settings.observes in ("every_query", "statistics"),
                    settings.drops_in_steps, settings.mode == "uneven")


@dataclasses.dataclass(frozen=True)
class Row:
    """What the worker does for one request of a step, whose new tokens are those from `start` to `end`.

    skipped:  columns of its table that attention does not read
    compacts: what is stored is compacted behind the step's attention
    observes: the step's queries are observed, for a method that sees every query
    queries:  how many of the newest queries the choice looks at (compacts), of this step and of kept ones
    keeps:    how many of the newest queries are kept for a later choice, if so many are there; 0: none
    """
    skipped: int
    compacts: bool
    observes: bool
    queries: int
    keeps: int


def row_of(schedule, start, end):
    skipped, following = schedule.dropped(start), schedule.next_compaction(end)
    compacts = schedule.compacts(end)
    if start >= schedule.prompt and not schedule.every_block:
        return Row(skipped, False, False, 0, 0)
    # Nothing is kept of queries for an end that never comes.
    observes = schedule.every_query and (compacts or following is not None)
    keeps = min(schedule.window, end) if following is not None and end > following - schedule.window else 0
    # A method that looks at no query is still told where the prompt stands, by its newest one.
    return Row(skipped, compacts, observes, min(max(schedule.window, 1), end), keeps)
