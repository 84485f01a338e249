"""The directives of lessons: ours, filled from the manifest and the question bank, and MyST's, made plain for Jupyter.

Ours (`expand`): `{question} A18` is the interviewer's question with its answer folded, `{followups} A18` what comes next and
which answers are wrong, `{exercise} kv-02` the exercise as the manifest has it. They become MyST, which the book renders;
`to_markdown` then makes of MyST what Jupyter shows: block quotes, `<details>` and links.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from minivllm.course.manifest import CourseError, Exercise, load_manifest
from minivllm.course.questions import Question, load_bank

_FENCE = re.compile(
    r"^(?P<fence>:{3,}|`{3,})\{(?P<name>[\w-]+)\}[ ]*(?P<title>[^\n]*)\n(?P<body>.*?)^(?P=fence)[ ]*$", re.S | re.M
)
_OPTIONS = re.compile(r"\A(?::[\w-]+:[^\n]*\n)+")


def expand(text: str) -> str:
    """Fill in our own directives. Raises `CourseError` for a row or an exercise that does not exist."""

    def fill(found: re.Match[str]) -> str:
        make = OURS.get(found["name"])
        return make(found["title"].strip()) if make else found[0]

    return _FENCE.sub(fill, text)


def _question(row: str) -> str:
    question = load_bank().question(row)
    answer = f"{question.answer}\n\n{_numbers(question)}".strip()
    return f"{_box('admonition', f'Asked in interviews ({row})', question.question, 'question')}\n\n{_fold('An answer in 90 seconds', answer)}"


def _numbers(question: Question) -> str:
    """The answer's numbers as a table: each is computed by its formula in the tests."""
    if not question.numbers:
        return ""
    units = ["" if n.unit in n.quoted else f" {n.unit}" for n in question.numbers]
    rows = [f"| {n.ask.replace('|', '/')} | {n.quoted}{u} |" for n, u in zip(question.numbers, units, strict=True)]
    return "\n".join(["| number | value |", "|---|---|", *rows])


def _followups(row: str) -> str:
    question = load_bank().question(row)
    asked = [_fold(f.question, f"A senior answer includes: {f.senior}") for f in question.followups]
    wrong = [f'- "{w.answer}" {w.why}' for w in question.wrong]
    correction = (
        [_box("admonition", "Where the usual answer is wrong or dated", question.correction)]
        if question.correction
        else []
    )
    heard = ["Wrong answers that are often heard:", "\n".join(wrong)] if wrong else []
    return "\n\n".join([*asked, *heard, *correction])


def _exercise(id: str) -> str:
    return _box("admonition", f"Exercise {id}", exercise_text(_known(id)), "tip")


def _known(id: str) -> Exercise:
    exercises = load_manifest()
    if id not in exercises:
        raise CourseError(f"exercise {id!r} is not in the manifest: there are {', '.join(exercises)}")
    return exercises[id]


def exercise_text(exercise: Exercise) -> str:
    """An exercise as its box says it: what, where, how long, for which points, and how to grade and run it."""
    holes = ", ".join(f"`{hole.qualname}`" for hole in exercise.holes)
    parts = "\n".join(f"| {part.name} | {part.points} |" for part in exercise.parts)
    commands = [f"python -m minivllm.course.grade {exercise.id}   # a report card; --hint for a hint"]
    if not all(hole.module.startswith("minivllm.calc.") for hole in exercise.holes):
        with_it = f"--with exercises/{exercise.file_name}"  # the line in the stub's head
        commands.append(f'python -m minivllm.course.run {with_it} "What is the capital of France?"')
    return (
        f"**{exercise.title}.** You write {holes} in `exercises/{exercise.file_name}`, in about {exercise.minutes} minutes. "
        f"Signature and docstring there are the contract.\n\n"
        f"| it must be that | points |\n|---|---|\n{parts}\n\n```sh\n{chr(10).join(commands)}\n```"
    )


def _box(name: str, title: str, body: str, kind: str = "") -> str:
    options = f":class: {kind}\n" if kind else ""
    return f":::{{{name}}} {title}\n{options}\n{body}\n:::"


def _fold(title: str, body: str) -> str:
    return f":::{{dropdown}} {title}\n\n{body}\n:::"


OURS: dict[str, Callable[[str], str]] = {"question": _question, "followups": _followups, "exercise": _exercise}

_NAMED = {"note": "Note", "tip": "Tip", "warning": "Warning", "important": "Important", "seealso": "See also"}


def to_markdown(text: str) -> str:
    """MyST as plain Markdown: what Jupyter and code hosts render. Directives may be nested (longer fences outside)."""
    text = re.sub(r"^\([\w-]+\)=\n", "", text, flags=re.M)
    text = _FENCE.sub(_plain_directive, text)
    text = re.sub(r"^\$\$ \([\w-]+\)$", "$$", text, flags=re.M)
    text = re.sub(r"\{doc\}`(?:([^<`]+) <)?([\w/-]+)>?`", _link, text)
    text = re.sub(r"\{term\}`(?:([^<`]+) <[^>]*>|([^`]+))`", lambda m: m[1] or m[2], text)
    return re.sub(r"\{(?:eq|ref|numref)\}`(?:[^`<]*<)?([\w-]+)>?`", r"*\1*", text)


def _link(found: re.Match[str]) -> str:
    """A lesson is a notebook beside this one; other pages exist in the book only."""
    words, target = found[1] or found[2], found[2].rpartition("/")[2]
    return f"[{words}]({target}.ipynb)" if re.match(r"\d\d_", target) else f"{words} (in the book)"


def _plain_directive(found: re.Match[str]) -> str:
    name, title = found["name"], found["title"].strip()
    body = to_markdown(_OPTIONS.sub("", found["body"].strip() + "\n").strip() + "\n").strip()
    if name == "math":
        return f"$$\n{body}\n$$"
    if name == "dropdown":
        return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
    if name not in ("admonition", *_NAMED):
        raise CourseError(f"lessons may not use the directive {{{name}}}: Jupyter could not show it")
    head = f"**{title or _NAMED[name]}**"
    return "\n".join(f"> {line}".rstrip() for line in [head, "", *body.splitlines()])
