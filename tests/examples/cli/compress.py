"""What `tessera compress` reads, writes and refuses."""
import random
import shutil
import struct

from checks import floats, layer, read_safetensors
from small_files import safetensors


def check_cuda(checks, arguments):
    """Never a silent fallback: a build without CUDA and a machine without a device each say so."""
    if not checks.has_cuda:
        checks.refuses(arguments, "no CUDA backend")
    elif shutil.which("nvidia-smi") is None:
        checks.refuses(arguments, "number of CUDA devices is 0", "--backend cpu")


def check_compress(checks):
    folder = checks.folder
    (folder / "layer").write_bytes(safetensors(layer()))
    base = "compress --in layer --out kept"
    checks.works(f"{base} --method snapkv --budget 40 --set window=16 --set pool=3", "40.0 of 60 tokens")
    written = read_safetensors(folder / "kept")
    metadata = written["__metadata__"]
    assert metadata["method"] == "snapkv" and metadata["window"] == "16" and metadata["pool"] == "3", metadata
    assert written["keep.indptr"]["dtype"] == "I64" and written["keep.indptr"]["shape"] == [3], written
    assert written["keep.indices"]["dtype"] == "I32" and written["keep.indices"]["shape"] == [80], written
    assert written["attend.indptr"]["shape"] == [7] and written["out"]["shape"] == [3, 4, 64], written
    assert written["lse"]["shape"] == [3, 4] and written["lse"]["dtype"] == "F32", written
    (folder / "kept").unlink()

    base += " --method snapkv"
    for budget in ("0", "-5", "1.5", "many", "99999999999"):
        checks.refuses(f"{base} --budget {budget}", "--budget", budget, "whole number")
    checks.refuses(base, "--budget is missing")
    checks.refuses(f"{base} --budget 16", "window is 32", "budget")
    checks.refuses(f"{base} --budget 40 --set window=0", "window is 0", "1 to 32768")
    checks.refuses(f"{base} --budget 40 --set window=41", "window is 41")
    checks.refuses(f"{base} --budget 40 --set window=8 --set window=9", "every parameter once")
    checks.refuses("compress --in layer --out kept --method pyramidkv --budget 40 --set layer=-2", "layer is -2")
    checks.refuses(f"{base} --budget 40 --set window=x", "'x'")
    checks.refuses(f"{base} --budget 40 --set window", "name=value")
    checks.refuses(f"{base} --budget 40 --set winow=8", "did you mean window?")
    checks.refuses(f"{base} --budget 40 --set pool=4", "pool is 4")
    check_cuda(checks, f"{base} --budget 40 --backend cuda")
    checks.refuses(f"{base} --budget 40 --backend tpu", "tpu")
    checks.refuses(f"{base} --budget 40 --threads -1", "--threads")
    checks.refuses("compress --in layer --out kept --method snapvk --budget 40", "did you mean snapkv?")
    checks.refuses("compress --in absent --out kept --method full", "absent")
    checks.refuses("compress --in . --out kept --method full", "a folder")
    checks.refuses("compress --in layer --out absent/kept --method full", "absent/kept")
    checks.refuses("compress --in layer --method full", "--out")
    checks.refuses("compress --in layer --out kept --method h2o --budget 20", "n_q", "60")
    checks.works("compress --in layer --out kept --method full", "60.0 of 60")
    checks.notes("compress --in layer --out kept --method full --budget 40", "--budget has no effect")
    (folder / "more").write_bytes(safetensors({**layer(), "boundaries": ("U8", [60], bytes(60)), "w": floats(2)}))
    checks.notes("compress --in more --out kept --method snapkv --budget 40", "not used by snapkv: tensor boundaries, w")
    checks.notes("compress --in layer --out kept --method streaming_llm --budget 40", "not used by streaming_llm: tensor q")
    check_scores(checks)
    check_segments(checks)
    check_step_segments(checks)
    check_rope(checks)
    check_projection(checks)
    check_engine(checks)
    check_given_scores(checks)
    check_lines(checks)
    (folder / "kept").unlink()

    whole = safetensors(layer())
    for cut in (0, 4, 8, 40, len(whole) - 1):
        (folder / "cut").write_bytes(whole[:cut])
        checks.refuses("compress --in cut --out kept --method full", "cut")
    for name, change, expected in (
            ("nan", {"k": ("F32", [2, 60, 64], b"\x00\x00\xc0\x7f" * 7680), "v": floats(2, 60, 64)}, "element 0"),
            ("type", {"k": ("U8", [2, 60, 64], bytes(7680))}, "tensor"),
            ("shape", {"v": floats(2, 59, 64, dtype="BF16")}, "shape of tensor v"),
            ("heads", {"k": floats(2, 60, 64), "v": floats(2, 60, 64), "q": floats(40, 3, 64)}, "multiple of kv_heads"),
            ("dim", {"k": floats(2, 60, 72), "v": floats(2, 60, 72), "q": floats(40, 4, 72)}, "72")):
        tensors = {} if name in ("heads", "dim") else layer()
        tensors.update(change)
        (folder / name).write_bytes(safetensors(tensors))
        checks.refuses(f"compress --in {name} --out kept --method full", expected)


def tensor(folder, name):
    """The numbers of one tensor of the file that was written."""
    content = (folder / "kept").read_bytes()
    header = read_safetensors(folder / "kept")
    start = 8 + struct.unpack("<Q", content[:8])[0]
    begin, end = header[name]["data_offsets"]
    letter, size = {"I64": ("q", 8), "I32": ("i", 4), "F32": ("f", 4)}[header[name]["dtype"]]
    return struct.unpack(f"<{(end - begin) // size}{letter}", content[start + begin:start + end])


def check_segments(checks):
    """SABlock needs boundaries, keeps one set for all heads and says in what blocks."""
    folder = checks.folder
    (folder / "marked").write_bytes(safetensors(layer()))
    base = "compress --in marked --out kept --method sablock --budget 24"
    checks.refuses(base, "tensor boundaries is missing", "sablock")
    flags = bytes(1 if token % 10 == 9 else 0 for token in range(60))
    (folder / "marked").write_bytes(safetensors({**layer(), "boundaries": ("U8", [60], flags)}))
    checks.works(base, "24.0 of 60 tokens")
    indptr, kept = tensor(folder, "keep.indptr"), tensor(folder, "keep.indices")
    checks.require(indptr == (0, 24, 48) and kept[:24] == kept[24:], "sablock", f"keep is {indptr}, {kept}")
    checks.require(kept[16:24] == tuple(range(52, 60)), "sablock", f"the window is {kept[16:24]}")
    sizes = tensor(folder, "segments.block_size")  # 52 tokens before the window: five segments and two tokens of the sixth
    counts = [sum(1 for token in kept[:16] if token // 10 == segment) for segment in range(6)]
    checks.require(len(sizes) == 6 and all((size == 0) == (count == 0) and size <= max(count, 0)
                                           for size, count in zip(sizes, counts)), "sablock", f"{sizes}, {counts}")
    checks.works(f"{base} --set largest=1", "24.0 of 60 tokens")
    checks.require(set(tensor(folder, "segments.block_size")) <= {0, 1}, "sablock", "blocks of more than one")
    checks.works(f"{base} --set form=balance --set coverage=0.5 --set alpha=0.1 --set lambda=0.9 --set strength=2")
    checks.refuses(f"{base} --set form=sum", "form", "product, balance")
    checks.refuses(f"{base} --set coverage=1.5", "coverage is 1.5", "0 to 1")
    (folder / "marked").write_bytes(safetensors({**layer(), "boundaries": ("U8", [60], bytes([2]) * 60)}))
    checks.refuses(base, "boundaries[0] is 2", "0 or 1")
    (folder / "marked").write_bytes(safetensors({**layer(), "boundaries": ("U8", [59], bytes(59))}))
    checks.refuses(base, "boundaries")


def check_step_segments(checks):
    """SentenceKV needs boundaries with its steps too, and reads everything when a segment of the answer begins."""
    base = "compress --in spoken --out kept --method sentencekv --budget 16 --set factor=2 --set start=2 --set recent=4"
    whole = {**layer(), "boundaries": ("U8", [60], bytes(1 if token % 10 == 9 else 0 for token in range(60)))}
    (checks.folder / "spoken").write_bytes(safetensors(whole))
    checks.refuses(base, "tensor boundaries_decode is missing", "sentencekv")
    for flags, lengths in ((bytes(3), (33, 16, 16)), (bytes([1, 0, 0]), (33, 34, 16)), (bytes([0, 1, 1]), (33, 16, 35))):
        (checks.folder / "spoken").write_bytes(safetensors({**whole, "boundaries_decode": ("U8", [3], flags)}))
        checks.works(base, "32.0 of 60 tokens")
        indptr = tensor(checks.folder, "attend.indptr")
        read = tuple(indptr[2 * step + 1] - indptr[2 * step] for step in range(3))
        checks.require(read == lengths, base, f"steps read {read}, expected {lengths}")
    for flags, said in ((("U8", [3], bytes([0, 0, 2])), "boundaries_decode[2] is 2"), (("U8", [2], bytes(2)), "boundaries_decode")):
        (checks.folder / "spoken").write_bytes(safetensors({**whole, "boundaries_decode": flags}))
        checks.refuses(base, said)


def check_rope(checks):
    """Expected Attention must know how the model's RoPE turns, and every query."""
    (checks.folder / "layer").write_bytes(safetensors(layer()))
    base = "compress --in layer --out kept --method expected_attention --budget 24"
    checks.refuses(base, "rope_theta is missing", "rope_theta=NUMBER")
    checks.refuses(f"{base} --set rope_theta=1e4", "n_q, the rows of tensor q is 40", "60 for expected_attention")
    checks.refuses(f"{base} --set rope_theta=0.5", "rope_theta is 0.5", "1 to 1e+12")
    checks.refuses(f"{base} --set rope_theta=fast", "rope_theta is 'fast'")
    checks.refuses("compress --in layer --out kept --method snapkv --budget 40 --set rope_theta=1e4", "rope_theta is set")
    (checks.folder / "all").write_bytes(safetensors(layer(n_q=60)))
    whole = base.replace("layer", "all") + " --set rope_theta=1e4"
    kept = []
    for setting in ("", " --set floor=0", " --set covariance=0", " --set future=1"):
        checks.works(whole + setting, "24.0 of 60 tokens")
        kept.append(tensor(checks.folder, "keep.indices"))
        checks.require(set(kept[-1][:4]) == {0, 1, 2, 3}, whole, f"the sinks are not kept: {kept[-1]}")
    checks.require(len(set(kept)) > 1, whole, "no setting makes a difference")


def check_projection(checks):
    """CriticalKV weighs values behind the output projection, where the file has one."""
    base = "compress --out kept --method criticalkv --budget 34 --set first=0 --in "
    one = layer()
    (checks.folder / "with").write_bytes(safetensors(one))
    checks.works(base + "with", "34.0 of 60 tokens")
    alone = tensor(checks.folder, "keep.indices")
    (checks.folder / "with").write_bytes(safetensors({**one, "output_projection": floats(4, 64, 3)}))
    checks.works(base + "with", "34.0 of 60 tokens")
    checks.require(tensor(checks.folder, "keep.indices") != alone, base, "the projection makes no difference")
    checks.notes("compress --in with --out kept --method snapkv --budget 40", "not used by snapkv: tensor output_projection")
    (checks.folder / "with").write_bytes(safetensors({**layer(), "output_projection": floats(2, 64, 3)}))
    checks.refuses(base + "with", "shape of tensor output_projection", "[q_heads, head_dim, hidden]")


def check_engine(checks):
    """KVzip lets the model read its prompt again, so it needs one."""
    checks.refuses("compress --in layer --out kept --method kvzip --budget 24", "method is kvzip", "needs no engine", "tessera run")


def check_given_scores(checks):
    """FastKVzip keeps what the file's scores rank highest; without them it says what they are."""
    base = "compress --out kept --method fastkvzip --budget 6 --set sinks=1 --set recent=2 --in "
    checks.refuses(base + "layer", "tensor scores is missing", "[kv_heads, tokens] F32", "add it to the file")
    one = layer()
    values = [float(i * 7 % 60) for i in range(2 * 60)]
    scored = {**one, "scores": ("F32", [2, 60], struct.pack("<120f", *values))}
    (checks.folder / "with").write_bytes(safetensors(scored))
    checks.works(base + "with", "6.0 of 60 tokens")
    kept = tensor(checks.folder, "keep.indices")
    for head in range(2):
        own = values[60 * head:60 * head + 60]
        best = sorted(range(1, 58), key=lambda position: (-own[position], position))[:3]
        wanted = sorted([0, *best, 58, 59])
        checks.require(list(kept[6 * head:6 * head + 6]) == wanted, base, f"head {head} keeps {kept}, not {wanted}")
    (checks.folder / "with").write_bytes(safetensors({**one, "scores": ("F32", [60], struct.pack("<60f", *values[:60]))}))
    checks.refuses(base + "with", "scores")


def check_lines(checks):
    """LoopServe needs all queries, writes its lines and outputs, and reads anew every few steps."""
    folder = checks.folder
    base = "compress --in layer --out kept --method loopserve --budget 20"
    (folder / "layer").write_bytes(safetensors(layer()))
    checks.refuses(base, "n_q, the rows of tensor q is 40", "60 for loopserve")
    (folder / "layer").write_bytes(safetensors(layer(n_q=60)))
    checks.works(f"{base} --set first=0 --set every=2 --set sampled_rows=7", "60.0 of 60 tokens")
    written = read_safetensors(folder / "kept")
    for name, kind, shape in (("lines.rows", "I32", [7]), ("lines.vertical.indptr", "I64", [5]), ("lines.slash.indptr", "I64", [5]),
                              ("prefill_out", "F32", [60, 4, 64]), ("prefill_lse", "F32", [60, 4]), ("attend.indptr", "I64", [7])):
        checks.require((written[name]["dtype"], written[name]["shape"]) == (kind, shape), "loopserve", f"{name}: {written[name]}")
    checks.require(tensor(folder, "attend.indptr") == (0, 21, 42, 64, 86, 107, 128), "loopserve", tensor(folder, "attend.indptr"))
    checks.works(f"{base} --set first=1 --set every=2")  # the first step reads everything
    checks.require(tensor(folder, "attend.indptr") == (0, 61, 122, 143, 164, 186, 208), "loopserve", tensor(folder, "attend.indptr"))
    checks.works(f"{base} --set per=q_head")
    checks.require(read_safetensors(folder / "kept")["attend.indptr"]["shape"] == [13], "loopserve", "not a list a query head")
    checks.refuses(f"{base} --set alpha=0", "alpha is 0")
    checks.refuses(f"{base} --set per=token", "per", "kv_head, q_head")
    checks.refuses("compress --in layer --out kept --method loopserve --budget 15", "observed is 16", "budget")
    (folder / "layer").write_bytes(safetensors(layer()))


def check_scores(checks):
    """What was kept is what scored best, by the scores that are written."""
    folder = checks.folder
    base = "compress --in layer --out kept --scores"
    for method, more, window in (("snapkv", "--set window=16", 16), ("ada_snapkv", "--set window=16", 16), ("h2o", "", 20),
                                 ("streaming_llm", "", 0), ("rocketkv", "--set window=4 --set max_new=4", 4)):
        (folder / "layer").write_bytes(safetensors(layer(n_q=60)))
        checks.works(f"{base} --method {method} --budget 40 {more}")
        indptr, positions, values = (tensor(folder, f"scores.{part}") for part in ("indptr", "positions", "values"))
        keep_at, kept = tensor(folder, "keep.indptr"), tensor(folder, "keep.indices")
        checks.require(indptr == (0, 60 - window, 2 * (60 - window)), method, f"scores.indptr is {indptr}")
        for head in range(2):
            stays = set(kept[keep_at[head]:keep_at[head + 1]])
            scored = dict(zip(positions[indptr[head]:indptr[head + 1]], values[indptr[head]:indptr[head + 1]]))
            checks.require(list(scored) == list(range(60 - window)), method, f"scored are {list(scored)}")
            worst = min(score for token, score in scored.items() if token in stays)
            best = max(score for token, score in scored.items() if token not in stays)
            checks.require(worst >= best, method, f"kept {worst}, dropped {best}")
    # where query heads choose apart, each has scores of its own
    (folder / "layer").write_bytes(safetensors(layer(n_q=60)))
    checks.notes(f"{base} --method loopserve --budget 20", "nothing was ranked", "the schedule has not fired")  # in three steps
    checks.works(f"{base} --method loopserve --budget 20 --set per=q_head --set first=0")
    indptr = tensor(folder, "scores.indptr")
    checks.require(len(indptr) == 5 and indptr[4] == len(tensor(folder, "scores.values")), "loopserve",
                   f"scores.indptr is {indptr} of four query heads")
    (folder / "kept").unlink()
    for method in ("full", "quest", "exact_topk"):
        budget = "" if method == "full" else "--budget 16"
        checks.refuses(f"{base} --method {method} {budget}", "--scores", "gives no token of the prompt a score")
    checks.notes(f"{base} --method snapkv --budget 60", "nothing was ranked")
    checks.require(tensor(folder, "scores.indptr") == (0, 0, 0), "snapkv", "scores where nothing was ranked")
    checks.works("compress --in layer --out kept --method snapkv --budget 40")
    checks.require("scores.values" not in read_safetensors(folder / "kept"), "snapkv", "scores that nobody asked for")


def check_compress_more(checks):
    folder = checks.folder
    for method, budget, expected in (("hsa", 16, {"page": "2", "channels": "32"}), ("quest", 16, {"page": "16"}),
                                     ("rocketkv", 16, {"split": "adaptive"})):
        checks.works(f"compress --in layer --out kept --method {method} --budget {budget} --set "
                     + ("max_new=4" if method != "rocketkv" else "window=2"))
        written = read_safetensors(folder / "kept")["__metadata__"]
        for name, value in expected.items():
            planned = written[name] == value if value != "adaptive" else 0 < float(written[name]) < 1
            checks.require(planned, method, f"{name} is written as {written[name]}")
        checks.require(written.get("page", "1") != "0" and written.get("channels", "1") != "0", method, written)
    checks.notes("compress --in layer --out kept --method pyramidkv --budget 40", "as snapkv")

    def with_turns(turns, dtype="I64", **more):
        content = struct.pack(f"<{len(turns)}{'q' if dtype == 'I64' else 'i'}", *turns)
        (folder / "turns").write_bytes(safetensors({**layer(n_q=60), "turns": (dtype, [len(turns)], content), **more}))

    def attended(method, turns):
        random.seed(7)
        with_turns(turns)
        checks.works(f"compress --in turns --out kept --method {method} --budget 16 --set window=2 --set max_new=4 --set split=1 --set pool=1")
        content = (folder / "kept").read_bytes()
        header = read_safetensors(folder / "kept")
        start = 8 + struct.unpack("<Q", content[:8])[0]
        begin, end = header["attend.indices"]["data_offsets"]
        return content[start + begin:start + end]

    checks.require(attended("rocketkv", []) == attended("rocketkv", [0]), "turns", "a leading 0 makes a difference")
    checks.require(attended("rocketkv_mt", [30, 50]) != attended("rocketkv", [30, 50]), "turns", "no difference")
    base = "compress --in turns --out kept --method full"
    for turns in ([30, 30], [40, 20], [60], [-1], [5, 2**40]):
        with_turns(turns)
        (folder / "kept").unlink(missing_ok=True)
        checks.refuses(base, "tensor turns")
    with_turns([30], dtype="I32")
    checks.refuses(base, "I64")

    huge = layer(dtype="F32")
    huge["q"] = ("F32", [40, 4, 64], struct.pack("<f", 1.9e19) * (40 * 4 * 64))
    huge["k"] = ("F32", [2, 60, 64], struct.pack("<f", 1.9e19) * (2 * 60 * 64))
    (folder / "huge").write_bytes(safetensors(huge))
    checks.refuses("compress --in huge --out kept --method snapkv --budget 40", "layer 0, query head 0", "token 0")
    keys = {**layer(n_q=60, dtype="F32"), "k": ("F32", [2, 60, 64], struct.pack("<f", 1e30) * (2 * 60 * 64))}
    (folder / "keys").write_bytes(safetensors(keys))
    checks.refuses("compress --in keys --out kept --method expected_attention --budget 40 --set rope_theta=1e4",
                   "layer 0, KV head 0, prompt token", "the score is nan")
    for method, score in (("knorm", "-inf"), ("keydiff", "nan")):
        checks.refuses(f"compress --in keys --out kept --method {method} --budget 40",
                       "layer 0, KV head 0, prompt token 0", f"the score is {score}")
    values = {**layer(n_q=60, dtype="F32"), "v": ("F32", [2, 60, 64], struct.pack("<f", 3e37) * (2 * 60 * 64))}
    (folder / "values").write_bytes(safetensors(values))
    for more in ("criticalkv --set window=8", "expected_attention --set rope_theta=1e4"):
        checks.refuses(f"compress --in values --out kept --method {more} --budget 40",
                       "layer 0, KV head 0, prompt token", "the score is nan")
    huge["q_decode"] = ("F32", [3, 4, 64], struct.pack("<f", 1.9e19) * (3 * 4 * 64))
    (folder / "huge").write_bytes(safetensors(huge))
    checks.refuses("compress --in huge --out kept --method streaming_llm --budget 40", "layer 0, query head 0, step 0")

    many = {f"tensor.with.a.long.name.{i}": ("U8", [0], b"") for i in range(300_000)}
    (folder / "many").write_bytes(safetensors({**layer(), **many}))
    checks.notes("compress --in many --out kept --method full", "more")
    (folder / "many").unlink()
    (folder / "kept").unlink()
