"""text-02 · Stop strings in streamed text · chapter 2 · about 25 minutes · 12 points

Replace each `raise NotImplementedError`. Signature and docstring are the contract; everything that they allow is right.
Add helpers and imports as you like; keep the names and the @solves marks.

    3  a stop string ends the text, wherever the pieces are cut
    2  of several stop strings the one that completes first wins
    3  only what may become a stop string is held back
    2  `include` and `active` do what they say
    2  for any text, stops and cuts the answer is that of a search character by character

Grade it:  python -m minivllm.course.grade text-02          (--hint for a hint)
Run it:    python -m minivllm.course.run --with exercises/text_02_stop_strings.py "What is the capital of France?"
"""
# cut from the engine: c1b78e24e3e3d023

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
        raise NotImplementedError("text-02: StopChecker.__init__")

    @property
    def held(self) -> str:
        """Text fed but not shown."""
        raise NotImplementedError("text-02: StopChecker.held")

    def feed(self, text: str, final: bool = False, active: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return (text to show now, the stop string that matched, if any).

        `final`: no more pieces follow, so nothing is held back. `active`: matches may complete in this piece.
        After a match, further pieces are dropped: the answer is ("", the match) again.
        """
        raise NotImplementedError("text-02: StopChecker.feed")
