"""Both detokenizers against one decoding of everything, over arbitrary tokens."""

from hypothesis import example, given
from hypothesis import strategies as st

from minivllm.course.offset_detok import OffsetDetokenizer
from minivllm.sample.detok import IncrementalDetokenizer

FINDINGS = ([b"a", b"\xc3\xa9\xe4\xb8\x96\xc3", b"\xa9\xc3", b"\xa9"], [b"x", b"a\xc3"])
AWKWARD = [b"\xc3", b"\xa9", b"\xe4", b"\xb8", b"\x96", b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xff", b"a"]


def decode(tokens):
    return b"".join(tokens).decode(errors="replace")


@st.composite
def cut_text(draw):
    """Some text's bytes, cut anywhere."""
    data = draw(st.text(max_size=20)).encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(len(data) - 1, 1)))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]


awkward_piece = st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=4).map(b"".join)
token_streams = st.one_of(
    cut_text(),
    st.lists(st.binary(max_size=5), max_size=30),
    st.lists(awkward_piece, max_size=40),
)


def stream(detokenizer, tokens):
    return [detokenizer.push(i) for i in range(len(tokens))], detokenizer.finish()


def by_bytes(tokens):
    return IncrementalDetokenizer(tokens.__getitem__)


def by_offsets(tokens, window=6):
    return OffsetDetokenizer(lambda ids: decode([tokens[i] for i in ids]), window=window)


@given(token_streams)
@example(FINDINGS[0])
@example(FINDINGS[1])
def test_by_bytes_the_stream_is_the_whole_decoding(tokens):
    shown, rest = stream(by_bytes(tokens), tokens)
    assert "".join(shown) + rest == decode(tokens)


@given(token_streams, st.integers(4, 8))
@example(FINDINGS[0], 6)
@example(FINDINGS[1], 6)
def test_by_offsets_the_stream_is_the_whole_decoding(tokens, window):
    shown, rest = stream(by_offsets(tokens, window), tokens)
    assert "".join(shown) + rest == decode(tokens)


@given(token_streams)
def test_what_is_shown_is_at_all_times_the_beginning_of_every_text_that_may_follow(tokens):
    for build in (by_bytes, by_offsets):
        detokenizer, shown = build(tokens), ""
        for i in range(len(tokens)):
            shown += detokenizer.push(i)
            for end in (b"", b"!", b"\xa9", b"\x80", b"\x96!"):
                assert decode([*tokens[: i + 1], end]).startswith(shown)


@given(cut_text())
def test_valid_text_never_shows_a_replacement_character_that_it_lacks(tokens):
    for build in (by_bytes, by_offsets):
        shown, _ = stream(build(tokens), tokens)
        assert "".join(shown).count("\ufffd") <= decode(tokens).count("\ufffd")


@given(token_streams)
def test_by_bytes_nothing_is_held_but_an_unfinished_character(tokens):
    shown, rest = stream(by_bytes(tokens), tokens)
    assert rest in ("", "\ufffd")
    assert len(decode(tokens)) - len("".join(shown)) <= 1


@given(st.lists(awkward_piece, max_size=60))
def test_by_offsets_what_one_step_decodes_is_bounded(tokens):
    lengths = []
    detokenizer = OffsetDetokenizer(lambda ids: lengths.append(len(ids)) or decode([tokens[i] for i in ids]))
    stream(detokenizer, tokens)
    assert max(lengths) <= 2 * detokenizer.window + 2


@given(token_streams, st.data())
def test_skipped_tokens_count_as_absent(tokens, data):
    skipped = frozenset(data.draw(st.sets(st.integers(0, max(len(tokens) - 1, 0)))))
    kept = [token for i, token in enumerate(tokens) if i not in skipped]
    bytewise = IncrementalDetokenizer(tokens.__getitem__, skipped)
    offsets = OffsetDetokenizer(lambda ids: decode([tokens[i] for i in ids]), skip_ids=skipped)
    for detokenizer in (bytewise, offsets):
        shown, rest = stream(detokenizer, tokens)
        assert "".join(shown) + rest == decode(kept)
