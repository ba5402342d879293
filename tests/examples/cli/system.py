"""What the tool does at the ends of a file system, of its streams and of a container."""
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import threading

from checks import HANG, TOOL, layer
from small_files import safetensors


def check_outputs(checks):
    """Where a result may go: devices, FIFOs, links, names and rights."""
    folder = checks.folder
    base = "compress --in layer --method full --out"
    (folder / "wanted").unlink(missing_ok=True)
    checks.works(f"{base} wanted")
    wanted = (folder / "wanted").read_bytes()
    (folder / "link").symlink_to("target")
    for _ in range(2):  # to a missing target, then to an existing one
        checks.works(f"{base} link")
        checks.require((folder / "link").is_symlink() and (folder / "target").read_bytes() == wanted, base, "link lost")
    os.mkfifo(folder / "fifo")
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / "fifo").read_bytes()))
    reader.start()
    checks.works(f"{base} fifo")
    reader.join()
    checks.require(read == [wanted] and (folder / "fifo").is_fifo(), base, "FIFO")
    checks.works(f"{base} /dev/null")
    checks.require(pathlib.Path("/dev/null").is_char_device(), base, "/dev/null is no device any more")
    checks.refuses(f"{base} /dev/full", "/dev/full", "No space left")
    (folder / "closed").write_text("precious")
    (folder / "closed").chmod(0o444)
    checks.refuses(f"{base} closed", "closed", "permission")
    checks.require((folder / "closed").read_text() == "precious", base, "a read-only file was overwritten")
    (folder / "target").chmod(0o640)
    checks.works(f"{base} target")
    checks.require((folder / "target").stat().st_mode & 0o777 == 0o640, base, "rights changed")
    longest = "n" * 255
    checks.works(f"{base} {longest}")
    checks.refuses(f"{base} {longest}n", "too long")
    checks.refuses(f"{base} {'d/' * 2500}x", "too long")
    checks.refuses(f"{base} layer/x", "layer/x")
    checks.refuses(f"{base} .", "a folder")
    for name in ("wanted", "link", "target", "fifo", "closed", longest):
        (folder / name).unlink()
    checks.refuses(f"{base} limited", "limited", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)))


def check_inputs(checks):
    """What an input may be: told apart, and never a wait."""
    folder = checks.folder
    os.mkfifo(folder / "fifo")
    (folder / "alone").mkdir()
    compress, run = "compress --out kept --method full --in", "run --method full --model"
    evaluate = "eval --model model --methods full --questions"
    for command in (f"{compress}", f"{run} model --prompt", f"{evaluate}"):
        checks.refuses(f"{command} fifo", "fifo is a FIFO")
        checks.refuses(f"{command} alone", "alone is a folder")
        checks.refuses(f"{command} absent", "absent is missing")
        checks.refuses(f"{command} /dev/zero", "/dev/zero is a device")
        checks.refuses(f"{command} {'d/' * 2500}x", "too long")
    for name in ("config.json", "tokenizer.model", "model.safetensors"):
        shutil.copytree(folder / "model", folder / "copy")
        (folder / "copy" / name).unlink()
        os.mkfifo(folder / "copy" / name)
        checks.refuses(f"{run} copy --prompt prompt", name, "a FIFO")
        shutil.rmtree(folder / "copy")
    checks.refuses(f"{run} model --prompt /proc/self/mem", "/proc/self/mem")
    if os.getuid() == 0:
        (folder / "alone").chmod(0o600)
        (folder / "alone" / "text").write_text("text")

        def nobody():
            os.setuid(65534)
        folder.chmod(0o755)
        probe = subprocess.run([TOOL, "--version"], preexec_fn=nobody, capture_output=True, check=False)
        if probe.returncode == 0:
            checks.refuses(f"{run} model --prompt alone/text", "no permission", preexec_fn=nobody)
            checks.refuses(f"{run} alone --prompt prompt", "no permission", preexec_fn=nobody)
            checks.refuses(f"{evaluate} alone/text", "no permission", preexec_fn=nobody)
    (folder / "fifo").unlink()
    shutil.rmtree(folder / "alone")


def check_streams(checks):
    """Standard output that cannot be written, and signals."""
    for command in ("list", "list --json", "--help", "run --help", "--version",
                    "run --model model --prompt prompt --max-new 3 --method full"):
        with open("/dev/full", "w", encoding="utf-8") as full:
            result = checks.run(command, stdout=full)
        if result.returncode != 2 or "standard output is not writable (No space left" not in result.stderr:
            checks.complain(f"{command} > /dev/full", result, "expected exit 2 and a sentence")
        result = checks.run(command, preexec_fn=lambda: os.close(1))
        if result.returncode != 2 or "standard output is not writable" not in result.stderr:
            checks.complain(f"{command} >&-", result, "expected exit 2 and a sentence")


def check_limits(checks):
    """A container's limits: threads and memory."""
    def little(mebibytes):
        return lambda: resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))
    run = "run --model model --prompt prompt --max-new 3 --method full"
    if checks.run("--version", preexec_fn=little(1500)).returncode != 0:
        return  # a sanitized program needs more than any limit
    checks.notes(f"{run} --threads 1024", "of 1024 threads; working with these", preexec_fn=little(1500))
    # below the least the kernel itself ends a program that does not fit; above it the answer is the program's own
    least = next(size for size in range(8, 1500, 4) if checks.run("--version", preexec_fn=little(size)).returncode == 0)
    for mebibytes in (least, least + 4, least + 12, least + 32):
        result = checks.run(f"{run} --threads 1", preexec_fn=little(mebibytes))
        if result.returncode not in (0, 2, 127) or not (result.stdout or result.stderr):
            checks.complain(run, result, f"with {mebibytes} MiB")
    # room for the file, not for what is read from it
    row = bytes(64 * 4)
    (checks.folder / "large").write_bytes(safetensors({"k": ("F32", [2, 16_000, 64], row * 32_000),
                                                       "v": ("F32", [2, 16_000, 64], row * 32_000),
                                                       "q": ("F32", [8, 8, 64], row * 64)}))
    mebibytes = least + 20 + ((checks.folder / "large").stat().st_size >> 20)
    command = "compress --in large --out kept --method snapkv --budget 40 --set window=8 --threads 1"
    result = checks.run(command, preexec_fn=little(mebibytes))
    told = re.search(r"not enough memory while snapkv over large: [\d.]+ MiB more were refused; ", result.stderr)
    if result.returncode != 2 or not told or (checks.folder / "kept").exists():
        checks.complain(command, result, f"expected exit 2 and what needed how much, with {mebibytes} MiB")
    (checks.folder / "large").unlink()


def check_interruption(checks):
    """A signal ends a command without leaving anything behind; an evaluation keeps what it has finished."""
    folder = checks.folder
    (folder / "report").unlink(missing_ok=True)  # another command's
    before = sorted(folder.rglob("*"))
    command = "eval --model model --methods full,snapkv,h2o --budgets 40,64 --context 400 --families single --count 2000 --json report"
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        # a shell's background job is started with SIGINT ignored, which the tool would respect
        heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
        with subprocess.Popen([TOOL, *command.split()], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, preexec_fn=heard) as process:
            for line in process.stderr:
                if line.startswith("documents"):
                    break
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=HANG)
        checks.count += 1
        told = re.search(r"interrupted after (\d+) of (\d+) documents", stderr)
        checks.require(process.returncode == code and told, command, f"exit {process.returncode}: {stderr}")
        if told and int(told[1]) > 0:
            report = json.loads((folder / "report").read_text())
            asked = sum(cell["questions"] for cell in report if cell["method"] == "full" and cell["turn"] == 1)
            checks.require(asked == int(told[1]) and "snapkv" in stdout, command, f"{asked} questions, {told[0]}")
        (folder / "report").unlink(missing_ok=True)
    for command in ("heads --model model --context 400 --families single --count 200000 --out found",
                    "calibrate --model model --context 400 --families single --samples 200000 --out found"):
        with subprocess.Popen([TOOL, *command.split()], cwd=folder, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) as process:
            told = process.stderr.readline()  # a sign of life
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=HANG)
        checks.count += 1
        checks.require("so far" in told and process.returncode == 143 and "interrupted" in stderr, command,
                       f"exit {process.returncode}: {stderr}")
    left = sorted(set(folder.rglob("*")) ^ set(before))
    checks.require(not left, command, f"left behind, or took away: {left}")
