#!/usr/bin/env python3
"""Checks that no type, enumerator, function or member of the headers has a name that says nothing of the thing.

Usage: words.py REPOSITORY. Variables of functions and parameters are not looked at.
"""
import pathlib
import re
import sys

INSTEAD = {
    "place": "slot, address or entry; sequence_layer for a (layer, sequence)",
    "most": "capacity, upper_bound or max_x",
    "own": "step_tokens, new_rows, or what is owned", "fresh": "new_rows or added", "new": "new_rows or added",
    "asked": "queries or requested", "seen": "observed", "held": "stored", "kept": "selection, retained or stored",
    "passed": "candidates", "again": "the action, as in reconsidered_tokens",
    "put": "store or write", "take": "load, advance or acquire", "come": "append or the event", "give": "release, return or hand out",
    "one": "the thing: item, sequence, head", "each": "the thing: item, per_head",
    "before": "previous_x or the count", "after": "next_x or the count", "here": "the thing: current_x, local_x",
    "to": "output, target or end", "of": "the thing or the operation", "at": "index, slot, row or position", "from": "source, input or first",
    "room": "capacity or free_rows", "lists": "candidates",
}
TOKEN = re.compile(r"[A-Za-z_]\w*|\.?\d(?:[\w.']|[eEpP][+-])*|::|->|<<=|&&|\|\||[^\s]")
TEXT = re.compile(r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![\w\'])\'(?:\\.|[^\'\\\n])+\'', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.M)
CLOSING = {"(": ")", "[": "]", "{": "}"}
TYPES = ("struct", "class", "union", "enum")


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def tokens_of(text):
    """(token, line) of C++ text without its comments, strings, directives and macros of Tessera's that take no arguments."""
    text = DIRECTIVE.sub(blank, TEXT.sub(blank, text))
    line, last = 1, 0
    for match in TOKEN.finditer(text):
        line, last = line + text.count("\n", last, match.start()), match.start()
        if not re.match(r"TESSERA_(\w*NAMESPACE\w*|HD|HOST|DEVICE|INLINE)$", match.group()):
            yield match.group(), line


class declarations:
    """Names that a header declares, as (name, line): what stands at the level of a namespace, a type or an enumeration."""

    def __init__(self, text):
        self.tokens = list(tokens_of(text)) + [("", 0)] * 3
        self.names = []
        self.scope(0)

    def word(self, i):
        return self.tokens[i][0] if 0 <= i < len(self.tokens) else ""

    def closed(self, i):
        """The index behind what the bracket at `i` opens."""
        closing, depth = CLOSING[self.word(i)], 0
        opening = self.word(i)
        while i < len(self.tokens) - 3:
            depth += (self.word(i) == opening) - (self.word(i) == closing)
            i += 1
            if depth == 0:
                break
        return i

    def closed_angle(self, i):
        """The index behind the list of template parameters that begins at `i`."""
        depth = 0
        while i < len(self.tokens) - 3:
            if self.word(i) in CLOSING:
                i = self.closed(i)
                continue
            depth += (self.word(i) == "<") - (self.word(i) == ">")
            i += 1
            if depth == 0:
                break
        return i

    def body(self, i):
        """The index behind a function's body at `i`. Types in it have members."""
        end = self.closed(i)
        while i < end:
            if self.word(i) in TYPES and self.word(i - 1) not in ("<", ","):
                i = self.type(i)
            else:
                i += 1
        return end

    def type(self, i):
        """The index behind the head and the body of a type that begins at `i`, or behind its head alone."""
        enumeration, i = self.word(i) == "enum", i + 1
        if enumeration and self.word(i) in ("class", "struct"):
            i += 1
        while self.word(i) in ("alignas", "[") or self.word(i).startswith("__"):
            i = self.closed(i if self.word(i) == "[" else i + 1)
        if re.match(r"[A-Za-z_]", self.word(i)):
            if self.word(i + 1) in ("{", ":", ";", "final", "<"):
                self.names.append(self.tokens[i])
            i += 1
        brace = i
        while self.word(brace) not in ("{", ";", "", ")", "=", "}"):
            brace = self.closed(brace) if self.word(brace) == "(" else brace + 1
        if self.word(brace) != "{" or self.word(i) not in ("{", ":", "final", "<"):
            return i
        return self.enumerators(brace) if enumeration else self.scope(brace + 1)

    def enumerators(self, i):
        end = self.closed(i)
        while i < end:
            if self.word(i) in ("{", ",") and re.match(r"[A-Za-z_]", self.word(i + 1)):
                self.names.append(self.tokens[i + 1])
            i = self.closed(i) if self.word(i) in "([" else i + 1
        return end

    def initializers(self, i):
        """The index of the body behind a constructor's list that begins behind `i`."""
        while True:
            i += 1
            while self.word(i) not in ("(", "{", ""):
                i += 1
            if self.word(i) == "":
                return i
            i = self.closed(i)
            if self.word(i) == ".":
                i += 3
            if self.word(i) != ",":
                return i

    def scope(self, i):
        """Reads declarations from `i` to the brace that ends their scope; the index behind it."""
        while self.word(i) not in ("", "}"):
            i = self.declaration(i)
        return i + 1

    def declaration(self, i):
        """The index behind one declaration. A name is an identifier that something follows which only a declarator has."""
        while self.word(i) not in ("", "}"):
            word = self.word(i)
            if word == ";":
                return i + 1
            if word == "template":
                i = self.closed_angle(i + 1) if self.word(i + 1) == "<" else i + 1
            elif word == "namespace":
                while self.word(i) not in ("{", ";", ""):
                    i += 1
                return self.scope(i + 1) if self.word(i) == "{" else i
            elif word in TYPES:
                i = self.type(i)
            elif word == "=":
                while self.word(i) not in (";", ",", "", "}"):
                    i = self.closed(i) if self.word(i) in CLOSING else i + 1
            elif word == ":" and self.word(i - 1) in (")", "noexcept"):
                i = self.initializers(i)
            elif word == "{":
                return self.body(i)
            elif word in CLOSING:
                if word == "(" and self.word(i + 1) == "*" and self.word(i + 3) == ")":  # a pointer to a function
                    self.names.append(self.tokens[i + 2])
                i = self.closed(i)
            else:
                if (re.match(r"[A-Za-z_]", word) and self.word(i + 1) in ("(", ";", "=", "{", "[", ",", ":")
                        and self.word(i - 1) not in ("::", ".", "->", "", "(", "<")
                        or self.word(i - 1) in ("using", "concept")):
                    self.names.append(self.tokens[i])
                i += 1
        return i


def instead_of(name):
    """What to write in place of `name`, or nothing."""
    if name.startswith("most_"):
        return "max_x, capacity or upper_bound"
    return INSTEAD.get(name.rstrip("_"))


def check(root):
    for path in sorted((root / "include").rglob("*")):
        if path.suffix not in (".hpp", ".cuh"):
            continue
        for name, line in declarations(path.read_text(encoding="utf-8")).names:
            if instead := instead_of(name):
                yield f"{path.relative_to(root)}:{line}: {name} says nothing of the thing; use {instead}"


def main(repository):
    problems = list(check(pathlib.Path(repository).resolve()))
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
