"""A film's HTML steps without a library, is the same in every build, and shows its last frame without JavaScript."""

import json
import re

from minivllm.course.film import ABSENT, Film, Frame, Look


def film(*captions: str) -> Film:
    made = Film(100, 50, "two <boxes>")
    first, second = made.add_box(0, 0, 10, 10), made.add_box(20, 0, 10, 10)
    for number, caption in enumerate(captions):
        made.frames.append(Frame(caption, {first: Look("held h1", str(number)), second: Look("idle", "same")}))
    return made


def data_of(html: str) -> list:
    found = re.search(r"const \[looks, frames\] = (\[.*?\]), boxes", html)
    assert found
    return json.loads(found[1])


def test_the_last_frame_shows_without_javascript():
    html = film("first", "last")._repr_html_()
    assert '<output aria-live="polite">last</output>' in html
    assert ">1</text>" in html.split("<script>")[0]


def test_a_frame_carries_only_what_changed():
    looks, frames = data_of(film("a", "b", "c")._repr_html_())
    assert [len(changes) for _, changes in frames] == [2, 1, 1]
    assert tuple(looks[0]) == (ABSENT.kind, "", "", "")


def test_the_same_film_has_the_same_html_and_another_one_another_id():
    assert film("a", "b")._repr_html_() == film("a", "b")._repr_html_()
    assert film("a", "b").id != film("a", "c").id


def test_words_are_escaped_in_markup_and_script():
    html = film("a", "</script><b>")._repr_html_()
    assert html.count("</script>") == 1
    assert "two &lt;boxes&gt;" in html


def test_the_slider_can_be_used_and_heard_without_a_mouse():
    html = film("a", "b")._repr_html_()
    assert 'type="range"' in html
    assert 'aria-valuetext="b"' in html
    assert 'role="img"' in html


def test_nothing_is_fetched():
    assert not re.search(r"(src|href)=|url\(|import", film("a")._repr_html_())


def test_a_single_picture_brings_no_script_and_no_slider():
    html = film("only")._repr_html_()
    assert "<script>" not in html
    assert "<input" not in html
