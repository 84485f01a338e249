"""Run the model through the reader's own code, in a fresh process, and bring back its answers and the drawing of its run.

A lesson calls `run_mine("kv-02", prompts)`. Exercises that are not written yet are left to the engine, and it says so.
"""

from __future__ import annotations

import html
import json
import subprocess
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from minivllm.course.manifest import ROOT, CourseError, load_manifest
from minivllm.course.splice import install, is_stub

SECONDS = 300


@dataclass(frozen=True, slots=True)
class MyRun:
    """What came back: whose code ran, the prompts' answers with how many prompt tokens came from the cache, the drawing."""

    whose: str
    answers: list[tuple[str, int]]
    drawing: str
    text: str

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<li>{html.escape(text)} <small>({cached} tokens from the cache)</small></li>"
            for text, cached in self.answers
        )
        return f"<p><strong>{html.escape(self.whose)}</strong></p><ol>{rows}</ol>{self.drawing}"

    def __repr__(self) -> str:
        rows = [f"  {text!r} ({cached} tokens from the cache)" for text, cached in self.answers]
        return "\n".join([self.whose, *rows, self.text])


def run_mine(ids: str | Seq[str], prompts: Seq[str], max_tokens: int = 12, *, together: bool = False) -> MyRun:
    """Answer prompts greedily with the default model and the reader's version of these exercises.

    One after the other, or `together` in one batch. Raises `CourseError`, with the end of the error output, if that
    process fails or takes more than five minutes.
    """
    files, whose = _files([ids] if isinstance(ids, str) else ids)
    batches = [list(prompts)] if together else [[prompt] for prompt in prompts]
    task = json.dumps({"files": files, "batches": batches, "max_tokens": max_tokens})
    command = [sys.executable, "-m", "minivllm.course.mine"]
    try:
        done = subprocess.run(
            command, input=task, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        raise CourseError(
            f"your version was still running after {SECONDS} s: is there a loop that can't end?"
        ) from None
    if done.returncode:
        raise CourseError(f"your version failed:\n{done.stderr.strip()[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return MyRun(whose, [(text, cached) for text, cached in result["answers"]], result["drawing"], result["text"])


def _files(ids: Seq[str]) -> tuple[list[str], str]:
    """The files of exercises that have been started, and words that say whose code is going to run."""
    manifest = load_manifest()
    paths = {id: ROOT / "exercises" / manifest[id].file_name for id in ids}
    written = [id for id, path in paths.items() if path.exists() and not is_stub(path.read_text(encoding="utf-8"))]
    rest = [id for id in ids if id not in written]
    whose = [f"your {' and '.join(written)}"] if written else []
    whose += [f"the engine's own {' and '.join(rest)} (not written yet)"] if rest else []
    return [str(paths[id]) for id in written], f"This ran through {', and '.join(whose)}."


def _child() -> None:
    """Read a task on standard input, run it, write the result as the last line of standard output."""
    task = json.loads(sys.stdin.read())
    install([Path(file) for file in task["files"]])  # before anything of the engine is imported
    from minivllm.config import EngineConfig
    from minivllm.course.draw import draw_cache
    from minivllm.llm import LLM
    from minivllm.request import RequestOutput, SamplingParams

    llm = LLM(config=EngineConfig(num_kv_blocks=40, max_model_len=512, dtype="float32"))
    params = SamplingParams(temperature=0, max_tokens=task["max_tokens"])
    answers = []
    for batch in task["batches"]:
        for output in llm.generate(batch, params):
            assert isinstance(output, RequestOutput)
            answers.append((output.outputs[0].text, output.metrics.num_cached_tokens))
    film = draw_cache(llm, title="your run")
    print(json.dumps({"answers": answers, "drawing": film._repr_html_(), "text": repr(film)}))


if __name__ == "__main__":
    _child()
