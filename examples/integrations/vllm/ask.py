"""Asks a server of serve.sh about a long document, with the server's settings and as a request that stays whole;
prints what both held and read."""
import argparse
import json
import os
import pathlib
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[3]


def post(port, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def wait_for(port, server):
    """Until the server answers; an error if its process has ended."""
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except OSError:
            time.sleep(0.5)
            try:
                os.kill(server, 0)
            except ProcessLookupError:
                sys.exit("The server has ended:")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server", type=int, required=True, help="the server's process")
    parser.add_argument("--figures", type=pathlib.Path, required=True)
    parser.add_argument("--letters", type=int, default=9500, help="of the document")
    parser.add_argument("--new", type=int, default=24)
    asked = parser.parse_args()
    text = (ROOT / "examples" / "data" / "opticks.txt").read_text()[20000:20000 + asked.letters]
    middle = text.index("\n", asked.letters // 3) + 1
    prompt = (f"{text[:middle]}The secret code of calm comet is velvet walnut.\n{text[middle:]}\n"
              "Question: What is the secret code of calm comet?\nAnswer:")
    wait_for(asked.port, asked.server)
    answers = []
    for extra in (None, {"mode": "off"}):
        body = {"model": "shipped", "prompt": prompt, "max_tokens": asked.new, "temperature": 0, "ignore_eos": True}
        if extra is not None:
            body["vllm_xargs"] = {"tessera": json.dumps(extra)}
        answers.append(post(asked.port, body))
    lines = [json.loads(line) for line in asked.figures.read_text().splitlines()]
    print(f"\n{'':34}{'tessera':>16}{'whole':>16}")
    begins = [answer["choices"][0]["text"].split("\n")[0].strip() for answer in answers]
    print(f"{'answer begins':34}" + "".join(f"{text:>16}" for text in begins))
    for name, label in (("prompt", "tokens of the prompt"), ("generated", "tokens of the answer"),
                        ("blocks_of_all_tokens", "blocks of all its tokens"),
                        ("blocks_freed", "blocks freed behind the prompt"),
                        ("blocks_held", "blocks held at the end"),
                        ("tokens_stored_at_steps", "tokens before its steps, in all"),
                        ("tokens_read_at_steps", "tokens read of a layer, in all")):
        print(f"{label:34}" + "".join(f"{line[name]:>16,}" for line in lines))


if __name__ == "__main__":
    main()
