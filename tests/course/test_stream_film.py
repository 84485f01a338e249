"""The drawing of a stream says what the engine's own detokenizer and stop checker do."""

from minivllm.course.stream_film import draw_stream, follow_stream


def pieces(text, *cuts):
    data = text.encode()
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def test_an_unfinished_character_waits_until_its_last_byte():
    steps = follow_stream(pieces("a😀", 2, 4))
    assert [(step.undecoded, step.shown) for step in steps] == [(1, "a"), (3, "a"), (0, "a😀")]


def test_the_beginning_of_a_stop_string_is_held_and_a_match_ends_the_stream():
    steps = follow_stream([b"ab", b"E", b"ND", b"zz"], ["END"])
    assert [(step.shown, step.held, step.matched) for step in steps] == [
        ("ab", "", None),
        ("ab", "E", None),
        ("ab", "", "END"),
    ]


def test_one_frame_a_token_and_its_caption_in_words():
    film = draw_stream(pieces("x😀!", 2, 5), title="two tokens and a bit")
    assert [frame.caption for frame in film.frames] == [
        "token 0 brings 78 F0: shown 'x'; 1 byte waits",
        "token 1 brings 9F 98 80: shown 'x😀'",
        "token 2 brings 21: shown 'x😀!'",
    ]
    assert len(film.boxes) == 6 + 3


def test_held_and_dropped_characters_look_different_from_shown_ones():
    film = draw_stream([b"aE", b"ND"], ["END"])
    kinds = [[film.frames[i].looks[box].kind for box in sorted(film.frames[i].looks) if box >= 4] for i in (0, 1)]
    assert kinds == [["idle", "cached"], ["idle", "gone", "gone", "gone"]]
