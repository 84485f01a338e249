"""What graders say in a student's terms: that something should have been refused, and what came instead of what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FITS = 300
"""Characters of a value that are shown at most: two values, and plain pytest still shows both."""

DUE = "due: "
"""What the note on an exception begins with where another one was due."""


@contextmanager
def must_raise(kind: type[Exception], what: str) -> Iterator[None]:
    """`with must_raise(ValueError, "freeing a block twice"):` passes if the body raises that, and says so if it doesn't."""
    due = f"{what} must raise {kind.__name__}"
    try:
        yield
    except kind:
        return
    except Exception as error:
        error.add_note(DUE + due)
        raise
    raise AssertionError(f"{due}, but it went through")


def comparison(came: Any, expected: Any) -> list[str]:
    """Two values that should be equal, whole if they are short, else from where they first differ."""
    head = []
    if max(len(repr(came)), len(repr(expected))) > FITS and type(came) is type(expected) in (list, tuple, str):
        differ = (i for i, (a, b) in enumerate(zip(came, expected, strict=False)) if a != b)
        first = next(differ, min(len(came), len(expected)))
        head, came, expected = [f"first difference at index {first}"], came[first:], expected[first:]
    return [*head, f"came:     {_short(came)}", f"expected: {_short(expected)}"]


def _short(value: Any) -> str:
    if isinstance(value, bytes) and len(value) == 32:
        return f"the hash {value[:4].hex()}..."
    text = repr(value)
    return text if len(text) <= FITS else f"{text[: FITS - 3]}..."
