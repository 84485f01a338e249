"""Student files that do their worst, and a grader that grades them all in one go: `python -m tests.course.attacks OUT`.

Each is an answer to kv-02. Two right answers stand at both ends, which must not suffer from what is between them.
"""

import os
import pickle
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from minivllm.course.grading import Task, grade
from minivllm.course.manifest import load_manifest
from minivllm.course.records import Result

EXERCISE = load_manifest()["kv-02"]
LOOKUP = '@solves("minivllm.kv.prefix:longest_hit")\ndef longest_hit(hashes, num_tokens, block_size, index):\n'

HASHES = """
import hashlib
from array import array
from minivllm.course import solves
from minivllm.kv.prefix import ROOT_HASH

@solves("minivllm.kv.prefix:hash_block")
def hash_block(parent, token_ids, salt=""):
    secret = salt.encode()
    return hashlib.sha256(parent + len(secret).to_bytes(4, "big") + secret + array("q", token_ids).tobytes()).digest()

@solves("minivllm.kv.prefix:extend_hashes")
def extend_hashes(hashes, token_ids, block_size, salt=""):
    for i in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else ROOT_HASH
        hashes.append(hash_block(parent, token_ids[i * block_size : (i + 1) * block_size], "" if i else salt))

"""

RIGHT = f"""{HASHES}{LOOKUP}    hits = []
    for block_hash in hashes[: max(num_tokens - 1, 0) // block_size]:
        block = index.find(block_hash)
        if block is None:
            break
        hits.append(block)
    return hits
"""


@dataclass(frozen=True)
class Attack:
    """An answer, and limits of the exercise that are tighter or wider for it."""

    text: str
    limits: dict[str, float] = field(default_factory=dict)


def lookup(body: str, **limits: float) -> Attack:
    """Right hashes, and a `longest_hit` that does this."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return Attack(HASHES + LOOKUP + lines, limits)


def beside(line: str) -> Attack:
    """A right answer with this after it."""
    return Attack(f"{RIGHT}\n{line}\n")


def patched(line: str) -> Attack:
    """Wrong in everything, with a changed grader."""
    wrong = HASHES.replace("    secret = salt.encode()\n", "    return b''\n")
    return Attack(f"{wrong}{line}\n{LOOKUP}    return []\n")


CLAIM = '{"exercise":"kv-02","part":"the last token is always left to compute","test":"x","status":"passed"}'

ATTACKS = {
    "right first": Attack(RIGHT),
    "endless loop": lookup("while True: pass"),
    "loop that swallows": lookup(
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        seconds=5.0,
        part_seconds=30.0,
    ),
    "loop in C": lookup("while True: pow(3, 10**8, 10**100000)", seconds=5.0, part_seconds=30.0),
    "crash": lookup("import ctypes\nctypes.string_at(0)"),
    "os._exit(0)": lookup("import os\nos._exit(0)"),
    "os._exit(0) at import": beside("import os; os._exit(0)"),
    "sys.exit": lookup("import sys\nsys.exit(0)"),
    "sys.exit at import": beside("import sys; sys.exit(0)"),
    "pytest.exit": lookup("import pytest\npytest.exit('done', 0)"),
    "pytest.skip": lookup("import pytest\npytest.skip('not today')"),
    "patch a test's run": patched("import _pytest.python; _pytest.python.Function.runtest = lambda self: None"),
    "patch the code of a method": patched(
        "import _pytest.runner as r; r.CallInfo.from_call.__func__.__code__ = (lambda cls, f, w, r=None: 0).__code__"
    ),
    "patch hypothesis.given": patched(
        "import hypothesis; hypothesis.given = lambda *a, **k: lambda f: lambda self=None: 0"
    ),
    "patch hypothesis inside": patched(
        "import hypothesis.core as c; c.StateForActualGivenExecution.run_engine = lambda self: None"
    ),
    "patch pytest.raises": patched(
        "import pytest, contextlib; pytest.raises = lambda *a, **k: contextlib.suppress(Exception)"
    ),
    "patch builtins": patched("import builtins; builtins.len = lambda x: 32"),
    "import the grader": patched("import minivllm.course.plugin as p; p._describe = lambda *a: None"),
    "claim on every descriptor": lookup(
        f"import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'part ' + {CLAIM!r}.encode() + b'\\nend\\n')\n"
        "    except OSError: pass"
    ),
    "forged result file": lookup(
        "open('results.json', 'w').write('{\"score\": 100}')\nprint('25/25 passed')\nreturn []"
    ),
    "import the hole": beside("from minivllm.kv.prefix import longest_hit as theirs"),
    "hole by module alias": beside("import minivllm.kv.prefix as p; theirs = p.longest_hit"),
    "hole by from-import of the module": beside("from minivllm.kv import prefix; theirs = prefix.longest_hit"),
    "import solutions": beside("from solutions import kv_02_longest_hit"),
    "import the tests": beside("import tests.exercises.test_kv_02"),
    "read solutions": lookup(
        "import minivllm, pathlib\nroot = pathlib.Path(minivllm.__file__).parents[1]\n"
        "exec((root / 'solutions' / 'kv_02_longest_hit.py').read_text())"
    ),
    "leave a hole out": Attack(HASHES),
    "engine in another process": lookup(
        "import subprocess, sys\ncode = 'import minivllm.kv.prefix as p; print(p.longest_hit.__code__.co_filename)'\n"
        "raise ValueError(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)",
        part_seconds=10.0,
        seconds=60.0,
    ),
    "30 GiB": lookup("return bytearray(30 << 30)"),
    "much memory in many processes": lookup(
        "import os, time\nfor _ in range(16):\n    if os.fork() == 0:\n        x = bytearray(1 << 28)\n"
        "        x[::4096] = b'x' * len(x[::4096])\n        time.sleep(60)\ntime.sleep(60)",
        memory_gib=1.0,
        part_seconds=30.0,
    ),
    "fork loop": lookup("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", seconds=6.0),
    "fork loop that leaves its session": lookup(
        "import os\nwhile True:\n    try: os.fork(); os.setsid()\n    except OSError: pass", seconds=6.0
    ),
    "daemon": lookup(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\nreturn []"
    ),
    "child that goes on testing": lookup("import os\nos.fork()\nreturn []"),
    "prints without end": lookup(
        "import contextlib, os\nwhile True:\n    with contextlib.suppress(OSError): os.write(1, b'x' * 65536)",
        seconds=4.0,
        part_seconds=30.0,
    ),  # past the largest file that is allowed, writing fails: it goes on all the same
    "error at import": beside("1 / 0"),
    "syntax error": Attack("def f(:\n"),
    "right last": Attack(RIGHT),
}


def grade_all(folder: Path) -> dict[str, Result]:
    """Results by attack, with a time limit of one second a test where nothing else is said."""
    tasks = []
    for i, attack in enumerate(ATTACKS.values()):
        path = folder / f"answer_{i}.py"
        path.write_text(attack.text)
        exercise = replace(EXERCISE, **({"seconds": 30.0, "part_seconds": 1.5} | attack.limits))
        tasks.append(Task(exercise, str(path)))
    return dict(zip(ATTACKS, (graded.result for graded in grade(tasks, at_once=2)), strict=True))


def main(out: str) -> None:
    with tempfile.TemporaryDirectory(prefix="minivllm-test-") as folder:
        os.chmod(folder, 0o755)
        results = grade_all(Path(folder))
    left = [process.name() for process in psutil.Process().children(recursive=True)]
    Path(out).write_bytes(pickle.dumps((results, left)))


if __name__ == "__main__":
    main(sys.argv[1])
