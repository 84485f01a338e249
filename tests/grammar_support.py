"""Vocabularies out of the hand, an oracle of what may come next, and a model that draws anything that is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st

from minivllm.sample.grammar.automaton import Automaton
from minivllm.sample.grammar.mask import Grammar, GrammarError, Matcher, apply_masks
from minivllm.sample.grammar.vocabulary import Vocabulary, build_vocabulary

EOS = 0


def make_vocabulary(texts: list[bytes], size: int | None = None, eos: tuple[int, ...] = (EOS,)) -> Vocabulary:
    """Token 0 ends a text, token i is `texts[i - 1]`, all ids after them stand for nothing."""
    pieces = [b"<eos>", *texts]
    return build_vocabulary(lambda i: pieces[i] if i < len(pieces) else b"", size or len(pieces), (EOS,), eos)


@st.composite
def vocabularies(draw: st.DrawFn, alphabet: bytes) -> Vocabulary:
    """Chunks of some bytes, most but not all of which are tokens by themselves; some ids stand for nothing or for the same."""
    single = st.integers(0, len(alphabet) - 1).map(lambda i: alphabet[i : i + 1])
    chunks = draw(st.lists(st.lists(single, min_size=1, max_size=4).map(b"".join), max_size=40))
    alone = draw(st.lists(single, max_size=40))
    return make_vocabulary(chunks + alone, 1 + len(chunks) + len(alone) + draw(st.integers(0, 33)))


def bits(row, size: int) -> list[bool]:
    """The first `size` bits of a packed row, the lowest of each word first."""
    return [bool(int(row[i // 32]) >> (i % 32) & 1) for i in range(size)]


def live_states(automaton: Automaton, vocabulary: Vocabulary) -> set[int]:
    """From which states whole tokens lead to an accepting one: the plainest way to find out."""
    live = {state for state in range(len(automaton.table)) if automaton.accepting[state]}
    steps = {
        state: {automaton.run(text, state) for text in vocabulary.texts.values()}
        for state in range(len(automaton.table))
    }
    while new := {state for state in steps if state not in live and steps[state] & live}:
        live |= new
    return live


def can_accept(matcher: Matcher, token_id: int) -> bool:
    """Whether the matcher would take a token now; leaves it where it is."""
    try:
        matcher.accept(token_id)
    except GrammarError:
        return False
    matcher.rollback(1)
    return True


@dataclass
class Written:
    """What a random model wrote under a grammar, and whether it came to an end of its own."""

    text: bytes
    ended: bool


def write_at_random(grammar: Grammar, seed: int, max_tokens: int, eos_bias: float = 0.0) -> Written:
    """Draw from random logits, each step under the mask; a larger `eos_bias` ends earlier where that is allowed."""
    matcher, random, text = Matcher(grammar), Random(seed), b""
    size = grammar.vocabulary.size
    for _ in range(max_tokens):
        logits = torch.tensor([[random.gauss(0, 1) for _ in range(size)]])
        logits[0, EOS] += eos_bias
        apply_masks(logits, [0], matcher.row()[None])
        assert logits.max() > -torch.inf, "nothing left to say"
        token = int(logits.argmax())
        matcher.accept(token)
        if matcher.ended:
            return Written(text, True)
        text += grammar.vocabulary.texts[token]
    return Written(text, False)
