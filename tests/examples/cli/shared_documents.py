"""Questions about one document: what `tessera eval` says of them with and without its prefix cache."""
import json


def check(checks, base):
    """Answers and figures are the same."""
    folder = checks.folder
    several = f"{base.replace('h2o', 'h2o,tangram')} --context 300 --count 1 --families single,multi_key --questions-per-document 3 --json report"
    reports = []
    for cache, said in (("on", "were not read again"), ("off", "Prefix cache: 0 of ")):
        text = checks.works(f"{several} --prefix-cache {cache}", said, "6 questions in", "Read anew for every question: tangram (")
        assert "Memory: " in text or cache == "off", text
        reports.append(json.loads((folder / "report").read_text()))
    for once, each in zip(*reports):
        assert each.pop("prompt_tokens_reused") == 0, each
        assert (once.pop("prompt_tokens_reused") > once["prompt_tokens"] / 2) == (once["method"] != "tangram"), once
        assert once == each, (once, each)
    assert "Prefix cache" not in checks.works(f"{base} --context 300 --count 2 --families single")
    scbench = {"context": "One two three. " * 30, "multi_turns": [{"input": "Four?", "answer": "x"}, {"input": "Five?", "answer": "y"}]}
    (folder / "scbench").write_text(json.dumps(scbench))
    checks.works(f"{base} --questions scbench --json report", "turn 2", "1 documents in")
    checks.works(f"{base} --questions scbench --separately --json report", "were not read again", "2 questions in")
    assert {cell["turn"] for cell in json.loads((folder / "report").read_text())} == {1}
    checks.refuses(f"{base} --separately", "--separately", "--questions")
    checks.refuses_at_once(f"{base} --prefix-cache yes", "--prefix-cache is 'yes'; expected one of on, off")
    checks.refuses_at_once(f"{base} --questions-per-document 0", "--questions-per-document is '0'")
    checks.refuses_at_once(f"{base} --questions-per-document 2 --families frequent_words", "1 for family frequent_words")
    (folder / "report").unlink()
