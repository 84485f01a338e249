"""A wrong manifest is refused with exercise, field and fix."""

import pytest

from minivllm.course.manifest import CourseError, ManifestError, find_exercise, load_manifest

GOOD = {
    "id": '"kv-01"',
    "name": '"pool"',
    "title": '"The pool"',
    "chapter": "3",
    "row": '"B1"',
    "holes": '["minivllm.kv.block_pool:BlockPool.free"]',
    "minutes": "20",
    "difficulty": "2",
}
PART = '[[exercise.part]]\nname = "it works"\npoints = 3\n'


def load(tmp_path, *, part: str = PART, twice: bool = False, **changes: str | None):
    lines = {key: value for key, value in (GOOD | changes).items() if value is not None}
    text = "[[exercise]]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items()) + part
    (tmp_path / "exercises").mkdir()
    (tmp_path / "exercises" / "manifest.toml").write_text(text * (1 + twice))
    return load_manifest(tmp_path)


def test_a_good_one_is_typed(tmp_path):
    exercise = load(tmp_path)["kv-01"]
    assert (exercise.file_name, exercise.points, str(exercise.holes[0])) == (
        "kv_01_pool.py",
        3,
        "minivllm.kv.block_pool:BlockPool.free",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minutes": '"20"'}, "kv-01, minutes: must be of type int, not '20'"),
        ({"title": None}, "kv-01, title: is missing"),
        ({"colour": '"red"'}, "kv-01, colour: is not a field"),
        ({"holes": "[]"}, "kv-01, holes: is empty"),
        ({"holes": '["minivllm.kv.free"]'}, "kv-01, holes: 'minivllm.kv.free' is not of the form"),
        ({"needs": '["kv-00"]'}, "kv-01, needs: 'kv-00' is not an earlier exercise"),
        ({"difficulty": "9"}, "kv-01, difficulty: must be 1 to 5"),
        ({"id": '"pool"'}, "pool, id: must be an area and two digits"),
        ({"name": '"a-b"'}, "kv-01, name: 'a-b' becomes part of a file name"),
        ({"part": ""}, "kv-01, part: is missing"),
        ({"part": PART.replace("3", "0")}, "kv-01, part 'it works': points must be a whole number above 0"),
        ({"part": PART.replace("points", "marks")}, "kv-01, part: needs exactly name and points"),
        ({"part": PART * 2}, "kv-01, part: two parts have the same name"),
        ({"twice": True}, "kv-01, id: is used twice"),
    ],
)
def test_a_bad_one_is_refused(tmp_path, changes, message):
    with pytest.raises(ManifestError, match=r".") as caught:
        load(tmp_path, **changes)
    assert message in str(caught.value)


def test_an_unknown_id_lists_the_ids(tmp_path):
    with pytest.raises(CourseError, match="no exercise 'kv-99'; there are: kv-01"):
        find_exercise(load(tmp_path), "kv-99")
