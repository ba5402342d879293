"""Documents and questions of the long-range retrieval tasks, built from examples/data/tasks.json.

A task is a list of sentences to hide in a text (in document order), a list of turns (family, question,
answer) and the place of the first question. `render` hides the sentences in a slice of tokenised text
and returns the token sequence together with the spans of the answers.
"""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SPEC = json.loads((Path(__file__).resolve().parents[2] / "data" / "tasks.json").read_text())
FAMILIES = list(SPEC["families"])
NAMES = [f"{adjective} {noun}" for adjective in SPEC["adjectives"] for noun in SPEC["nouns"]]
WORDS = SPEC["words"]
VALUES = [" ".join(words) for words in itertools.permutations(WORDS, SPEC["value_words"])]
BOS = 1


@dataclass
class Task:
    """Sentences in document order, turns (family, question, answer), place: last, first or middle."""
    sentences: list = field(default_factory=list)
    turns: list = field(default_factory=list)
    place: str = "last"


def draw_numbers(rng, count):
    """Distinct numbers of five digits."""
    return [str(value) for value in rng.sample(range(10000, 100000), count)]


def draw_values(rng, count, numbers):
    """Distinct values of needles: words or, with probability `numbers`, numbers."""
    return draw_numbers(rng, count) if rng.random() < numbers else rng.sample(VALUES, count)


def interleave(rng, groups):
    """Merge several ordered lists at random, each keeping its order."""
    order = [index for index, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    iterators = [iter(group) for group in groups]
    return [next(iterators[index]) for index in order]


def needle(name, value):
    return SPEC["needle"].format(name=name, value=value)


def ask_one(codes, name, family="multi_key"):
    return family, SPEC["ask_one"].format(name=name), codes[name]


def ask_values(name, values):
    return "multi_value", SPEC["ask_values"].format(name=name), SPEC["separator"].join(values)


def ask_names(codes, names):
    question = SPEC["ask_names"].format(names=SPEC["separator"].join(names))
    return "multi_query", question, SPEC["separator"].join(codes[name] for name in names)


def ask_list(codes, names):
    question = SPEC["ask_list"].format(names=SPEC["separator"].join(names))
    items = [SPEC["list_item"].format(name=name, value=codes[name]) for name in names]
    return "long_answer", question, SPEC["list_separator"].join(items)


def ask_variables(chain, value):
    question = SPEC["ask_variables"].format(value=value)
    return "variable_tracking", question, SPEC["separator"].join(chain)


def ask_signals(words, count):
    question = SPEC["ask_signals"].format(count=SPEC["counts"][str(count)])
    return "frequent_words", question, SPEC["separator"].join(words[:count])


def draw_codes(rng, count, numbers):
    """`count` names with one value each."""
    return dict(zip(rng.sample(NAMES, count), draw_values(rng, count, numbers)))


def needles(codes):
    return [needle(name, value) for name, value in codes.items()]


def chain_sentences(chain, value):
    """The first variable gets the value, every other one its predecessor."""
    sentences = [SPEC["assign_value"].format(word=chain[0], value=value)]
    for source, word in zip(chain, chain[1:]):
        sentences.append(SPEC["assign_word"].format(word=word, source=source))
    return sentences


def signal_sentences(rng, words, frequencies):
    """Signal sentences in random order, words[i] frequencies[i] times."""
    drawn = [word for word, frequency in zip(words, frequencies) for _ in range(frequency)]
    rng.shuffle(drawn)
    return [SPEC["signal"].format(word=word) for word in drawn]


def chains_task(rng, lengths):
    """Chains of variables with a question for each."""
    words = iter(rng.sample(WORDS, sum(lengths)))
    chains = [[next(words) for _ in range(length)] for length in lengths]
    values = draw_numbers(rng, len(chains))
    groups = [chain_sentences(chain, value) for chain, value in zip(chains, values)]
    turns = [ask_variables(chain, value) for chain, value in zip(chains, values)]
    return Task(interleave(rng, groups), turns)


def signals_task(rng, frequencies, others, others_max, counts=(3,)):
    """Signal words with the given leading frequencies and `others` rarer ones."""
    words = rng.sample(WORDS, len(frequencies) + others)
    rare = [rng.randint(1, others_max) for _ in range(others)]
    sentences = signal_sentences(rng, words, list(frequencies) + rare)
    return Task(sentences, [ask_signals(words, count) for count in counts])


def values_task(rng, counts, others, numbers):
    """Names with several values each (`counts`) among `others` names with one value."""
    names = rng.sample(NAMES, len(counts) + others)
    values = iter(draw_values(rng, sum(counts) + others, numbers))
    several = {name: [next(values) for _ in range(count)] for name, count in zip(names, counts)}
    codes = {name: next(values) for name in names[len(counts):]}
    groups = [[needle(name, value) for value in listed] for name, listed in several.items()]
    groups += [[sentence] for sentence in needles(codes)]
    turns = [ask_values(name, listed) for name, listed in several.items()]
    return Task(interleave(rng, groups), turns), codes


def evaluation_task(family, rng, numbers=0.0):
    """One task of a family with exactly the settings of tasks.json (and `numbers` of zero)."""
    spec = SPEC["families"][family]
    if family in ("single", "single_first", "single_middle", "multi_key"):
        codes = draw_codes(rng, spec["needles"], numbers)
        place = family.split("_")[1] if family.startswith("single_") else "last"
        return Task(needles(codes), [ask_one(codes, rng.choice(list(codes)), family)], place)
    if family == "multi_value":
        return values_task(rng, [spec["values"]], spec["needles"], numbers)[0]
    if family == "multi_query":
        codes = draw_codes(rng, spec["needles"], numbers)
        return Task(needles(codes), [ask_names(codes, rng.sample(list(codes), spec["asked"]))])
    if family == "long_answer":
        codes = draw_codes(rng, spec["needles"], numbers)
        return Task(needles(codes), [ask_list(codes, rng.sample(list(codes), spec["asked"]))])
    if family == "variable_tracking":
        task = chains_task(rng, [spec["chain"], spec["distractors"]])
        task.turns = task.turns[:1]
        return task
    if family == "frequent_words":
        return signals_task(rng, spec["frequencies"], spec["others"], spec["others_max"])
    if family == "conversation":
        codes = draw_codes(rng, spec["needles"], numbers)
        names = rng.sample(list(codes), spec["turns"])
        return Task(needles(codes), [ask_one(codes, name, family) for name in names])
    raise ValueError(f"unknown family {family}")


def train_keys(rng, numbers):
    """One to 32 needles and up to twelve questions, the first of them anywhere."""
    codes = draw_codes(rng, rng.choice((1, 1, 1, 2, 3, 4, 6, 8, 8, 8, 8, 12, 16, 24, 32)), numbers)
    names = rng.sample(list(codes), rng.randint(1, min(12, len(codes))))
    place = rng.choice(("last", "last", "last", "first", "middle"))
    family = "multi_key"
    if len(codes) == 1:
        place = rng.choice(("last", "first", "middle"))
        family = "single" if place == "last" else f"single_{place}"
    return Task(needles(codes), [ask_one(codes, name, family) for name in names], place)


def train_values(rng, numbers):
    if rng.random() < 0.4:
        counts, others = [4], 4
    else:
        counts, others = [rng.randint(2, 6) for _ in range(rng.randint(1, 3))], rng.randint(0, 8)
    task, codes = values_task(rng, counts, others, numbers)
    asked = rng.sample(list(codes), rng.randint(0, min(3, others)))
    task.turns += [ask_one(codes, name) for name in asked]
    rng.shuffle(task.turns)
    return task


def train_query(rng, numbers):
    codes = draw_codes(rng, rng.choice((4, 6, 8, 8, 8, 12, 16)), numbers)
    turns = []
    for _ in range(rng.randint(1, 4)):
        count = min(rng.choice((2, 3, 4, 4, 4, 5, 6)), len(codes))
        turns.append(ask_names(codes, rng.sample(list(codes), count)))
    return Task(needles(codes), turns)


def train_list(rng, numbers):
    codes = draw_codes(rng, rng.choice((4, 8, 12, 16, 16, 16, 20)), numbers)
    count = 12 if rng.random() < 0.4 else rng.randint(3, 14)
    return Task(needles(codes), [ask_list(codes, rng.sample(list(codes), min(count, len(codes))))])


def train_chains(rng, _):
    lengths = [4, 4] if rng.random() < 0.5 else [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    task = chains_task(rng, lengths)
    rng.shuffle(task.turns)
    return task


def train_signals(rng, _):
    counts = rng.choice(((3,), (3,), (3,), (2,), (2, 3), (3, 2)))
    if rng.random() < 0.4:
        spec = SPEC["families"]["frequent_words"]
        return signals_task(rng, spec["frequencies"], spec["others"], spec["others_max"], counts)
    third = rng.randint(3, 8)
    second = max(third + 2, round(third * rng.uniform(1.3, 2.0)))
    first = max(second + 2, round(second * rng.uniform(1.3, 2.0)))
    return signals_task(rng, (first, second, third), rng.randint(2, 8), max(1, third // 2), counts)


def train_mixed(rng, numbers):
    """Everything in one document, questions of all kinds."""
    task, codes = values_task(rng, [rng.randint(2, 4)], rng.randint(3, 8), numbers)
    names = list(codes)
    chains = chains_task(rng, [rng.randint(2, 5) for _ in range(rng.randint(1, 2))])
    signals = signals_task(rng, (7, 4, 2), 2, 1)
    turns = task.turns + chains.turns + signals.turns
    turns += [ask_one(codes, name) for name in rng.sample(names, 3)]
    turns.append(ask_names(codes, rng.sample(names, rng.randint(2, 3))))
    turns.append(ask_list(codes, rng.sample(names, 3)))
    turns = rng.sample(turns, rng.randint(3, len(turns)))
    return Task(interleave(rng, [task.sentences, chains.sentences, signals.sentences]), turns)


MIXTURE = {train_keys: 0.32, train_values: 0.14, train_query: 0.10, train_list: 0.08, train_chains: 0.14,
           train_signals: 0.12, train_mixed: 0.10}


def training_task(rng, numbers):
    """A task of a random family with varied settings."""
    task = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0](rng, numbers)
    if task.place == "last" and rng.random() < 0.1:
        task.place = rng.choice(("first", "middle"))
    return task


def sample_sentences(rng):
    """Sentences, questions and answers of one training task (text for the tokenizer)."""
    task = training_task(rng, numbers=0.5)
    turns = [line for _, question, answer in task.turns[:2]
             for line in (SPEC["question"].format(question=question).strip(), f"{SPEC['answer']} {answer}")]
    return rng.sample(task.sentences, min(12, len(task.sentences))) + turns


class Renderer:
    """Hides tasks in slices of tokenised text."""

    def __init__(self, processor, tokens):
        self.processor = processor
        self.tokens = tokens
        self.newline = processor.piece_to_id("\n")
        pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
        self.ends_sentence = np.array([piece.endswith(".") for piece in pieces])
        self.starts_word = np.array([len(piece) > 1 and piece[0] == "\u2581" and piece[1].isalpha()
                                     for piece in pieces])

    def encode(self, texts):
        return self.processor.encode(texts, num_threads=1)

    def slice(self, rng, length):
        """A slice of the text, mostly from the start of a line."""
        start = rng.randrange(len(self.tokens) - length - 512)
        if rng.random() < 0.8:
            lines = np.flatnonzero(self.tokens[start:start + 400] == self.newline)
            start += int(lines[0]) + 1 if len(lines) else 0
        return self.tokens[start:start + length]

    def spots(self, text, lines_only):
        """Places where a sentence may be inserted: line starts, both ends, perhaps sentence ends."""
        is_line = text[:-1] == self.newline
        allowed = is_line
        if not lines_only:
            allowed = is_line | (self.ends_sentence[text[:-1]] & self.starts_word[text[1:]])
        return np.concatenate([[0], np.flatnonzero(allowed) + 1, [len(text)]])

    def hide(self, rng, text, sentences, lines_only):
        """The text with the sentences inserted at random depths, in the order given."""
        spots = self.spots(text, lines_only)
        depths = sorted(self.depth(rng, len(text)) for _ in sentences)
        right = np.clip(np.searchsorted(spots, depths), 1, len(spots) - 1)
        nearer_left = np.asarray(depths) - spots[right - 1] < spots[right] - np.asarray(depths)
        chosen = spots[right - nearer_left]
        plain = self.encode(sentences)
        spaced = self.encode([" " + sentence for sentence in sentences])
        parts, previous = [], 0
        for spot, bare, after_space in zip(chosen, plain, spaced):
            parts.append(text[previous:spot])
            previous = spot
            if spot == 0 or text[spot - 1] == self.newline:
                parts.append(bare + [self.newline])
            elif spot == len(text):
                parts.append([self.newline] + bare)
            else:
                parts.append(after_space)
        parts.append(text[previous:])
        return np.concatenate(parts).astype(np.int32)

    @staticmethod
    def depth(rng, length):
        """Uniform, with some weight on the very beginning and the very end."""
        draw = rng.random() * 1.04 - 0.02
        return min(max(draw, 0.0), 1.0) * length

    def render(self, rng, task, document=None, total=None, lines_only=True, vary=False):
        """Token sequence and answer spans [(start, end, family)] of a task.

        Either `document` (tokens of text) or `total` (tokens of the whole sequence) is given. Spans are
        indices of the answer's tokens, its closing newline included. With `vary`, blank lines appear at
        random between turns. Returns None when the task does not fit `total`.
        """
        questions = self.encode([SPEC["question"].format(question=turn[1]) for turn in task.turns])
        answers = self.encode([" " + turn[2] for turn in task.turns])
        cue = self.encode([SPEC["answer"]])[0]
        blank = [[]] + [[self.newline] * (vary and rng.random() < 0.25) for _ in task.turns[1:]]
        if total is not None:
            fixed = 2 + sum(len(part) for group in (questions, answers, blank) for part in group)
            fixed += len(task.turns) * (len(cue) + 1)
            fixed += sum(len(part) + 1 for part in self.encode(task.sentences))
            if total - fixed < 24:
                return None
            document = total - fixed
        text = self.slice(rng, document)
        body = self.hide(rng, text, task.sentences, lines_only)
        place = task.place
        if place == "middle":
            lines = np.flatnonzero(body == self.newline) + 1
            target = len(body) * (rng.uniform(0.1, 0.9) if vary else 0.5)
            place = "middle" if len(lines) else "first"
        sequence = [BOS]
        if place == "first":
            sequence += questions[0] + body.tolist()
        elif place == "middle":
            split = int(lines[np.argmin(np.abs(lines - target))])
            sequence += body[:split].tolist() + questions[0] + body[split:].tolist()
        else:
            sequence += body.tolist()
        sequence.append(self.newline)
        spans = []
        for index, (turn, question, answer) in enumerate(zip(task.turns, questions, answers)):
            sequence += blank[index]
            if index > 0 or place == "last":
                sequence += question
            sequence += cue
            spans.append((len(sequence), len(sequence) + len(answer) + 1, FAMILIES.index(turn[0])))
            sequence += answer + [self.newline]
        return sequence, spans


def training_row(rng, renderer, length, numbers):
    """A training sequence of at most `length` + 1 tokens (a few less at times) and its answer spans."""
    while True:
        row = renderer.render(rng, training_task(rng, numbers), total=length + 1,
                              lines_only=rng.random() < 0.6, vary=True)
        if row is not None and length - 24 <= len(row[0]) <= length + 1:
            return row
