"""The book's generated pages, as Markdown: chapters, exercises, questions, machines, models, errata, decisions.

They have no content of their own: what they list is in the manifest, the question bank, the calculators, book/errata.toml
and book/decisions/.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.calc.hw import DEVICES, GB, Device
from minivllm.calc.models import SHAPES, Shape
from minivllm.calc.roofline import ridge_flops_per_byte
from minivllm.course.gate import Report
from minivllm.course.manifest import ROOT, Exercise, Hole, load_manifest
from minivllm.course.questions import Bank, Chapter, Question, load_bank
from minivllm.course.source import find_body, parse_file
from minivllm.course.weave import notebook_of

PARTS = {
    "model": "I. A model that talks",
    "kv": "II. Memory: the paged cache",
    "sched": "III. Time: the scheduler",
    "quant": "IV. Bits: quantisation",
    "scale": "V. Size: fitting, splitting, starting",
    "serve": "VI. Traffic: serving and operating",
    "fleet": "VII. Fleet and people",
}


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; bars within cells are escaped."""
    lines = [
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, ["---"] * len(head), *rows]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chapters() -> str:
    """Contents: every chapter of the plan, a link where it is written."""
    bank = load_bank()
    out = [
        "# Chapters",
        "",
        "Each chapter is a notebook that runs: `lessons/` in the repository. Chapters without a link are not written yet.",
    ]
    for part, title in _parts(bank).items():
        mine = [chapter for chapter in bank.chapters if chapter.part == part]
        out += [
            "",
            f"## {title}",
            "",
            table(["", "chapter", "rows", "exercises"], [_chapter_row(c, bank) for c in mine]),
        ]
    written = [f"lessons/{path.stem}" for chapter in bank.chapters if (path := woven(chapter))]
    return "\n".join([*out, "", "```{toctree}", ":hidden:", "", *written, "```", ""])


def _parts(bank: Bank) -> dict[str, str]:
    return {c.part: PARTS.get(c.part, c.part) for c in bank.chapters}


def _chapter_row(chapter: Chapter, bank: Bank) -> list[object]:
    rows = ", ".join(q.id for q in bank.of_chapter(chapter.number))
    mine = [e for e in load_manifest().values() if e.chapter == chapter.number]
    return [chapter.number, _chapter_link(chapter), rows, ", ".join(e.id for e in mine)]


def _chapter_link(chapter: Chapter, up: str = "") -> str:
    path = woven(chapter)
    return f"[{chapter.title}]({up}lessons/{path.name})" if path else chapter.title


def woven(chapter: Chapter) -> Path | None:
    """The chapter's notebook; None while it was never woven: such a chapter is a draft, and not in the book."""
    notebook = notebook_of(chapter.source) if chapter.source else None
    return notebook if notebook is not None and notebook.exists() else None


def exercise_index() -> str:
    """All exercises with their points, then each with its parts."""
    exercises = list(load_manifest().values())
    bank = load_bank()
    rows = [
        [
            f"[{e.id}](#{e.id})",
            e.title,
            _chapter_link(bank.chapter(e.chapter), "../"),
            e.row,
            "●" * e.difficulty,
            e.minutes,
            e.points,
        ]
        for e in exercises
    ]
    total = sum(e.points for e in exercises)
    intro = (
        f"{len(exercises)} exercises, {total} points. Each is a piece of the engine itself, cut out; graders are in `tests/exercises/`.\n"
        "How to work on one: [](student.md). Which wrong answers they catch: [](kills.md)."
    )
    head = ["exercise", "title", "chapter", "row", "difficulty", "minutes", "points"]
    details = [_exercise_section(e) for e in exercises]
    return "\n\n".join(["# Exercises", intro, table(head, rows), *details]) + "\n"


def _exercise_section(exercise: Exercise) -> str:
    holes = "\n".join(f"* {_place(hole)}" for hole in exercise.holes)
    needs = (
        f"Builds on {', '.join(exercise.needs)} (the engine's own versions are used for grading).\n\n"
        if exercise.needs
        else ""
    )
    parts = table(["it must be that", "points"], [[p.name, p.points] for p in exercise.parts])
    return f"({exercise.id})=\n## {exercise.id}: {exercise.title}\n\nStub: `exercises/{exercise.file_name}`. You write:\n\n{holes}\n\n{needs}{parts}"


def kill_tables(reports: Sequence[Report]) -> str:
    """Which wrong answers the graders see through, and by which part."""
    wrong, right = sum(len(r.kills) for r in reports), sum(len(r.rewrites) for r in reports)
    intro = (
        f"A grader that lets a wrong answer pass grades nothing. So each is tried on wrong answers, {wrong} so far, some of them real "
        f"bugs of real engines; and on answers that are right but written differently, {right} so far, which must get full "
        "marks. A cross: this part fails. Do the exercise before you read its table."
    )
    made = "Made by `python -m book.build kills`; `python -m minivllm.course.gate` proves it."
    return "\n\n".join(["# Wrong answers that are caught", intro, *map(_kill_table, reports), made]) + "\n"


def _kill_table(report: Report) -> str:
    parts = report.exercise.parts
    legend = "\n".join(f"{i}. {part.name} ({part.points})" for i, part in enumerate(parts, 1))
    rows = [
        [report.sentences[name], *("✗" if part.name in failed else "" for part in parts)]
        for name, failed in report.kills.items()
    ]
    head = ["wrong answer", *(str(i) for i in range(1, len(parts) + 1))]
    return f"## {report.exercise.id}: {report.exercise.title}\n\n{legend}\n\n{table(head, rows)}"


def _place(hole: Hole) -> str:
    """A symbol with its file and line."""
    _, node = find_body(parse_file(ROOT / hole.path), hole.qualname)
    return f"`{hole.qualname}` ({hole.path}, line {node.lineno})"


def question_index() -> str:
    """Row to chapter to exercise to symbol."""
    bank = load_bank()
    rows = [
        [
            f"[{q.id}](#row-{q.id.lower()})",
            q.question,
            _chapter_link(bank.chapter(q.chapter), "../"),
            ", ".join(q.exercises),
        ]
        for q in bank.questions
    ]
    intro = (
        "What interviewers ask, in the order of the chapters. `python -m minivllm interview` asks them in a terminal, takes your "
        "answer, checks its numbers and remembers what to repeat."
    )
    return (
        "\n\n".join(
            [
                "# Questions",
                intro,
                table(["row", "question", "chapter", "exercises"], rows),
                *map(_question_section, bank.questions),
            ]
        )
        + "\n"
    )


def _question_section(question: Question) -> str:
    rubric = "\n".join(f"* {point}" for point in question.rubric)
    symbols = "\n".join(f"* {_place(Hole.parse(symbol))}" for symbol in question.symbols)
    body = f":::{{dropdown}} Answer and rubric\n\n{question.answer}\n\nA good answer:\n\n{rubric}\n:::"
    code = f"The engine's code for it:\n\n{symbols}" if symbols else ""
    return f"(row-{question.id.lower()})=\n## {question.id}: {question.title}\n\n{question.question}\n\n{body}\n\n{code}".rstrip()


def hardware() -> str:
    """Datasheet numbers of the machines that the chapters compute with."""
    head = ["machine", "memory GB", "TB/s", "BF16", "FP8", "INT8", "FP4", "link GB/s", "PCIe GB/s", "ridge"]
    sources = "\n".join(
        f"* {d.name}: {d.source}" + (f" (estimated: {', '.join(d.estimated)})" if d.estimated else "") for d in DEVICES
    )
    intro = (
        "Dense peaks in TFLOP/s (TOP/s for INT8); vendors like to print them with 2:4 sparsity, twice as much. Bandwidths and sizes "
        "are decimal: 80 GB are 74.5 GiB. Link: NVLink of one GPU, both directions. PCIe: x16, one direction. Ridge: BF16 FLOP a byte "
        "of memory traffic, above which arithmetic binds. `*`: an estimate, no vendor publishes it. All of these are peaks: 70 to 85 % "
        "of bandwidth and 40 to 60 % of arithmetic are what good kernels reach."
    )
    return (
        "\n\n".join(["# Machines", intro, table(head, [_device_row(d) for d in DEVICES]), "## Sources", sources]) + "\n"
    )


def _device_row(device: Device) -> list[str]:
    def scaled(field: str, unit: float) -> str:
        value: float | None = getattr(device, field)
        return "" if value is None else f"{value / unit:,.4g}" + "*" * (field in device.estimated)

    peaks = [scaled(field, 1e12) for field in ("bf16", "fp8", "int8", "fp4")]
    links = [scaled(field, 1e9) for field in ("link_bytes_per_s", "pcie_bytes_per_s")]
    ridge = f"{ridge_flops_per_byte(device):.0f}"
    return [
        device.name,
        f"{device.memory_bytes / GB:.0f}",
        scaled("bandwidth_bytes_per_s", 1e12),
        *peaks,
        *links,
        ridge,
    ]


def models() -> str:
    """Shapes of models, with what follows from them."""
    head = ["model", "layers", "width", "heads/KV", "head", "FFN", "vocabulary", "parameters", "active", "KV B/token"]
    intro = "Parameters are computed from the shape, active ones are those a token visits. KV: both K and V, all layers, two bytes an element."
    return "\n\n".join(["# Models", intro, table(head, [_shape_row(s) for s in SHAPES])]) + "\n"


def _shape_row(shape: Shape) -> list[str]:
    ffn = (
        f"{shape.experts.total} x {shape.experts.width}, {shape.experts.active} active"
        if shape.experts
        else f"{shape.intermediate_size:,}"
    )
    return [
        shape.name, f"{shape.num_layers}", f"{shape.hidden_size:,}", f"{shape.num_heads}/{shape.num_kv_heads}", f"{shape.head_dim}", ffn,
        f"{shape.vocab_size:,}", f"{shape.parameters / 1e9:,.2f}e9", f"{shape.active_parameters / 1e9:,.2f}e9", f"{shape.kv_bytes_per_token():,}",
    ]  # fmt: skip


KINDS = {
    "wrong": ("Wrong", "These were never so."),
    "dated": ("True once", "These were so when they were written, and are still read."),
    "narrow": ("True of one case", "These hold in one case and are said of all."),
}


def load_errata() -> list[dict[str, Any]]:
    """The errors in public sources, as book/errata.toml has them."""
    entries: list[dict[str, Any]] = tomllib.loads((ROOT / "book" / "errata.toml").read_text(encoding="utf-8"))[
        "erratum"
    ]
    return entries


def errata() -> str:
    """Errors in public sources, then the usual answers that are wrong or dated, from the question bank."""
    intro = (
        "What papers, posts, documentation and code say that is not so, or not so any more: what is said and where, what is right, "
        "and how we know. Versions are vLLM 0.32.0 and the pages as they stood in 2026. If you find an error here, it belongs here."
    )
    out = ["# Errata of the sources", intro]
    for kind, (title, meaning) in KINDS.items():
        mine = [entry for entry in load_errata() if entry["kind"] == kind]
        out += [f"## {title}", f"{meaning} {len(mine)} of them.", *map(_erratum, mine)]
    usual = [
        f"### {q.id}: {q.title}\n\n{q.correction} {_row_links([q.id])}" for q in load_bank().questions if q.correction
    ]
    said = "What is said in interviews, without a source that one could name, and what is wrong with it."
    return "\n\n".join([*out, "## The usual answers", said, *usual]) + "\n"


def _erratum(entry: dict[str, Any]) -> str:
    rows = _row_links(entry.get("rows", []))
    return (
        f"### {entry['title']}\n\n**Said:** {entry['said']} ({entry['where']}.)\n\n**Right:** {entry['right']}\n\n"
        f"**How we know:** {entry['how']} {rows}"
    ).rstrip()


def _row_links(rows: Sequence[str]) -> str:
    links = ", ".join(f"[{row}](questions.md#row-{row.lower()})" for row in rows)
    return f"Asked in {links}." if links else ""


def decisions() -> str:
    """The decision records."""
    files = sorted((ROOT / "book" / "decisions").glob("[0-9]*.md"))
    return "\n".join(
        [
            "# Decisions",
            "",
            "Why things are as they are, one page a decision.",
            "",
            "```{toctree}",
            ":maxdepth: 1",
            "",
            *[f.stem for f in files],
            "```",
            "",
        ]
    )
