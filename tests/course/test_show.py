"""`show` prints the engine's own lines, and of an exercise only the contract until the reader passed."""

import pytest

from minivllm.course import show as show_module
from minivllm.course.manifest import CourseError, Exercise, Hole, Part
from minivllm.course.show import show

FREE = Exercise(
    "kv-09", "free", "t", 3, "B1", (Hole("minivllm.kv.block_pool", "BlockPool.free"),), 5, 1, (Part("p", 1),)
)


@pytest.fixture
def hole(monkeypatch, tmp_path):
    """A course with one exercise, which nobody passed yet, in a root of its own where only the record is looked up."""
    monkeypatch.setattr(show_module, "exercises", lambda: [FREE])
    monkeypatch.setattr(show_module, "has_passed", lambda exercise: False)
    return FREE


def test_the_lines_are_the_engines_with_file_and_line(hole):
    text = repr(show("minivllm.kv.block_pool:BlockPool.touch"))
    assert text.startswith("# minivllm/kv/block_pool.py, line ")
    assert "block.ref_count += 1" in text


def test_of_an_exercise_only_signature_and_contract_are_shown(hole):
    text = repr(show("minivllm.kv.block_pool:BlockPool.free"))
    assert "kv-09 is yours to write" in text
    assert "Drop one reference from each block" in text
    assert text.rstrip().endswith("...")
    assert "unhashed" not in text.split('"""')[2]


def test_a_class_is_shown_without_the_body_of_the_exercise_in_it(hole):
    text = repr(show("minivllm.kv.block_pool:BlockPool"))
    assert "unhashed.append(block)" not in text
    assert "def publish" in text
    assert "self.published.setdefault" in text


def test_private_methods_of_a_class_that_is_an_exercise_are_no_part_of_its_contract(hole, monkeypatch):
    whole = Exercise("kv-08", "l", "t", 6, "A35", (Hole("minivllm.kv.block_pool", "FreeList"),), 5, 1, (Part("p", 1),))
    monkeypatch.setattr(show_module, "exercises", lambda: [whole])
    text = repr(show("minivllm.kv.block_pool:FreeList"))
    assert "_insert" not in text
    assert "def __len__" in text
    assert "_insert" in repr(show("minivllm.kv.block_pool:FreeList", reveal=True))


def test_reveal_and_passing_open_the_body(hole, monkeypatch):
    assert "unhashed.append(block)" in repr(show("minivllm.kv.block_pool:BlockPool.free", reveal=True))
    monkeypatch.setattr(show_module, "has_passed", lambda exercise: True)
    assert "unhashed.append(block)" in repr(show("minivllm.kv.block_pool:BlockPool.free"))


def test_a_function_can_be_given_itself_and_another_put_beside_it(hole):
    from minivllm.kv.prefix import extend_hashes

    shown = show(extend_hashes, beside=test_reveal_and_passing_open_the_body)
    assert len(shown.pieces) == 2
    assert "tests/course/test_show.py" in shown.pieces[0].where
    assert 'class="pair"' in shown._repr_html_()


@pytest.mark.parametrize("target", ["minivllm.kv.block_pool", "minivllm.kv.block_pool:Nothing", "minivllm.nothing:x"])
def test_a_wrong_name_is_an_error_that_says_so(target):
    with pytest.raises(CourseError):
        show(target)


def test_the_html_is_the_same_in_every_build(hole):
    target = "minivllm.kv.block_pool:BlockPool.free"
    assert show(target)._repr_html_() == show(target)._repr_html_()
