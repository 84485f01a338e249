"""text-02 · Stop strings in streamed text: the engine's own answer, cut from it. Do not edit.

Why like this.

* What was shown cannot be taken back, so an end of the text that may become a stop string waits. Only the longest such end has to:
  everything before it can no longer be part of a match that includes the last character.
* The match that completes first wins because a reader of the stream, character by character, would have stopped there. It makes
  the answer independent of how the model cut its tokens.
* Only the waiting end and the new piece are searched: a match that began earlier would have kept its beginning waiting.
"""

from __future__ import annotations

from minivllm.course import solves


@solves("minivllm.sample.stop:StopChecker")
class StopChecker:
    """Finds the first stop string in text that comes in pieces, and says how much of the text may be shown already.

    A stop string may begin in one piece and end in another, and must not be shown, nor any part of it. So the end of the
    text is held back while it may be the beginning of a stop string. Characters, not tokens, are what is counted.

    Contract, with `text` all pieces fed so far, joined:

    * the match is the one that *completes* first, whichever began first; among several that complete at the same
      character the one first in `stop`. It is found by the piece that holds its last character;
    * so how the text is cut into pieces makes no difference: not to the match, nor to what is shown in the end;
    * with a match, what has been shown in all is the text before it; with `include`, the text up to its end;
    * without one, what has been shown plus `held` is `text`, and after a final piece `held` is empty;
    * nothing that has been shown is ever taken back;
    * `held` is as short as that allows: the longest end of the text that is the beginning of a stop string, without being
      all of it. It is shorter than the longest stop string, and nearly always empty. (vLLM, `v1/engine/detokenizer.py`,
      holds back as many characters as the longest stop string has, less one, whatever they are: simpler, and a constant
      delay.) With `include` nothing is held back, as the stop string will be shown in any case; but what was shown
      must be remembered, since a match may have begun in it. `held` is then always empty;
    * a match must complete in a piece fed with `active`; it may begin before. (vLLM's rule for `min_tokens`: text from
      the first `min_tokens` tokens completes no match, and is held back all the same.)

    Who feeds one token's text at a time knows that the last token fed completed the match: token ids end there.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        """`stop` must hold no empty string (`SamplingParams` refuses them)."""
        self.stop = stop
        self.include = include
        self.matched: str | None = None
        self._pending = ""  # the longest end of the text that may grow into a match

    @property
    def held(self) -> str:
        """Text fed but not shown."""
        return "" if self.include else self._pending

    def feed(self, text: str, final: bool = False, active: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return (text to show now, the stop string that matched, if any).

        `final`: no more pieces follow, so nothing is held back. `active`: matches may complete in this piece.
        After a match, further pieces are dropped: the answer is ("", the match) again.
        """
        if self.matched is not None:
            return "", self.matched
        old, text = self._pending, self._pending + text
        shown = len(old) - len(self.held)
        match = self._first_to_complete(text, len(old)) if active else None
        if match is not None:
            start, self.matched = match
            self._pending = ""
            return text[shown : start + len(self.matched) if self.include else start], self.matched
        self._pending = "" if final else text[len(text) - self._growing(text) :]
        return text[shown : len(text) - len(self.held)], None

    def _first_to_complete(self, text: str, old: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that completes first after the first `old` characters of `text`."""
        found = [(text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self.stop]
        matches = [match for match in found if match[0] >= 0]
        return min(matches, key=lambda match: match[0] + len(match[1]), default=None)

    def _growing(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string, and not all of it."""
        longest = max(map(len, self.stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self.stop):
                return length
        return 0
