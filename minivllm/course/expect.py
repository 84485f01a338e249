"""What graders say in a student's terms: that something should have been refused, and what came instead of what."""

from __future__ import annotations

from types import TracebackType
from typing import Any

FITS = 300
"""Characters that a value may have to be shown whole: two of them, still shown by plain pytest."""

DUE = "due: "
"""What a note on an exception begins with if another one, or none at all, was due."""


class MustRaise:
    """`with MustRaise(ValueError, "freeing a block twice"):` passes if the body raises that, and says so if it doesn't."""

    def __init__(self, kind: type[Exception], what: str) -> None:
        self.kind = kind
        self.due = f"{what} must raise {kind.__name__}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            raise AssertionError(f"{self.due}, but it went through")
        if not isinstance(error, self.kind):
            error.add_note(f"{DUE}{self.due}")
        return isinstance(error, self.kind)


def comparison(came: Any, expected: Any) -> list[str]:
    """Two values that should be equal, whole if they are short, else from where they first differ."""
    head = []
    if max(len(_repr(came)), len(_repr(expected))) > FITS:
        path, came, expected = first_difference(came, expected)
        head = [f"first difference at index {', '.join(map(str, path))}"] if path else []
    return [*head, f"came:     {_short(came)}", f"expected: {_short(expected)}"]


def first_difference(left: Any, right: Any, path: tuple[int, ...] = ()) -> tuple[tuple[int, ...], Any, Any]:
    """(indices that lead there, left value, right value); where one ends, what the other goes on with."""
    if type(left) is not type(right) or not isinstance(left, list | tuple | str):
        return path, left, right
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return ((*path, i), left[i:], right[i:]) if isinstance(left, str) else first_difference(a, b, (*path, i))
    i = min(len(left), len(right))
    return (*path, i), left[i:], right[i:]


def _short(value: Any) -> str:
    text = _repr(value)
    return text if len(text) <= FITS else f"{text[: FITS - 30]} ... ({len(text)} characters)"


def _repr(value: Any) -> str:
    if isinstance(value, bytes) and len(value) == 32:
        return f"the hash {value[:4].hex()}..."
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
