"""What Doxygen reads in place of a file: contracts as its paragraphs and lists, pages with its links.

docs/tools/docs_site.py calls it.

A contract (`///`) keeps its lines, so that warnings name the right ones:
- the comment that a header begins with describes the file;
- `Shapes   k [tokens, dim]`, a capital word and two or more spaces, becomes a paragraph with that title;
- indented lines, `score(token) -> float     what it is worth`, become a list;
- what Doxygen would not understand is left out;
- what it would take as a command, a tag or a link outside backticks is escaped.
A page gets a name, and links to other pages of the site become references to these; other links of the repository
lose their target.
"""
import os
import pathlib
import re

TITLE = re.compile(r"([A-Z][a-z]+) {2,}(\S.*)$")
ITEM = re.compile(r"(\S.*?) {2,}(\S.*)$")
SPANS = re.compile(r"((?<!`)(`+)(?!`).+?(?<!`)\2(?!`))", flags=re.S)
# A member's clause with :: in it, which Doxygen 1.9 takes for the beginning of an initialiser list.
REQUIRES = re.compile(r"(\) const) requires [\w<>:]+::\w+ \{")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def plain(text):
    """Text without what Doxygen acts on."""
    text = re.sub(r"(-{2,3})", r"\\\1", text.replace("\\", "\\\\"))  # dashes stay two
    return re.sub(r"([@&<>#%\"])", r"\\\1", text)


def code(span):
    """What stands in backticks, as a tag: a full stop within it would end a first sentence, a bar a cell."""
    text = re.sub(r"^(`+)\s?(.*?)\s?\1$", r"\2", span, flags=re.S).replace("\\|", "|").replace("`", "")
    text = plain(text).replace("::", "\\::").replace("|", "\\|")
    return "<tt>" + re.sub(r"\.(?=\s)", r".\\", text) + "</tt>"


def escaped(text):
    """Text of a contract, of which only backticks have a meaning."""
    parts = SPANS.split(text)
    made = {0: lambda part: plain(part).replace("*", "\\*"), 1: code, 2: lambda ticks: ""}
    return "".join(made[at % 3](part) for at, part in enumerate(parts))


def contract(lines):
    """Lines of one contract, without `///`, as Doxygen's."""
    def within_lines(match):
        return re.sub(r"\n(\s*)", rf"{match[2]}\n\1{match[2]}", match[1])

    lines = SPANS.sub(within_lines, "\n".join(lines)).split("\n")
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip() and not TITLE.match(line)]
    items = min((indent for indent in indents if indent >= 2), default=0)
    inside = None  # "title" or "item"
    for line in lines:
        indent, words = len(line) - len(line.lstrip()), line.strip()
        title = TITLE.match(line)
        if not words:
            inside = None
            yield ""
        elif title:
            inside = "title"
            yield f"@contract{{{title[1]}}} {escaped(title[2])}"
        elif inside == "title" and indent >= 2:
            yield escaped(words)
        elif indent == 0:
            yield ("@paragraph_end " if inside else "") + escaped(words)
            inside = None
        elif inside == "item" and indent > items:
            yield "  " + escaped(words)
        else:
            inside = "item"
            item = ITEM.match(words)
            if words.startswith("- "):
                yield "- " + escaped(words[2:])
            elif item:
                yield "- " + escaped(f"`{item[1].replace('`', '')}`") + ": " + escaped(item[2])
            else:
                yield "- " + escaped(f"`{words.replace('`', '')}`")


def header(text):
    text = REQUIRES.sub(r"\1 {", text)
    lines = text.split("\n")
    at = next((at for at, line in enumerate(lines) if not re.match(r"//(?!/)", line)), len(lines))
    for line, words in enumerate(contract([line[2:].strip() for line in lines[:at]])):
        lines[line] = "/// " + "@header_of " * (line == 0) + words
    while at < len(lines):
        begin = re.match(r"(\s*)///(?!<|/)", lines[at])
        if not begin:
            trailing = re.match(r"(.*?///<)(.*)$", lines[at]) or re.match(r"(\s*///<)(.*)$", lines[at])
            if trailing:
                lines[at] = trailing[1] + " " + escaped(trailing[2].strip())
            at += 1
            continue
        end = at
        while end < len(lines) and re.match(r"\s*///(?!<|/)", lines[end]):
            end += 1
        block = [re.sub(r"^\s*/// ?", "", line) for line in lines[at:end]]
        lines[at:end] = [f"{begin[1]}/// {line}".rstrip() for line in contract(block)]
        at = end
    return "\n".join(lines)


def page_name(path):
    """The reference of a page, from its path below the repository's root."""
    return "page_" + re.sub(r"\W", "_", path.removesuffix(".md"))


def page(text, path, pages, headers=()):
    def span(match):
        name = match[1].strip("`")
        return f"[{code(match[1])}](@ref {name})" if name in headers else code(match[1])

    folder = pathlib.PurePosixPath(path).parent

    def link(match):
        picture, words, target = match.groups()
        file, _, place = target.partition("#")
        if "://" in target:
            return match[0]
        if picture:
            return f"![{words}]({pathlib.PurePosixPath(file).name})"
        full = os.path.normpath(folder / file) if file else path
        if full in pages and not (place and not file):
            return f"[{words}](@ref {page_name(full)})"
        return words

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    for at in range(0, len(parts), 2):
        parts[at] = LINK.sub(link, parts[at])
        parts[at] = re.sub(r"^<!--.*?-->\n", "\n", parts[at], flags=re.M)
        parts[at] = SPANS.sub(span, parts[at])
    for at in range(1, len(parts), 2):
        parts[at] = re.sub(r"^```mermaid", "```", parts[at])
    return re.sub(r"^(# .*)$", rf"\1 {{#{page_name(path)}}}", "".join(parts), count=1, flags=re.M)
