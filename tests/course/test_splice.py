"""A student's definition takes the place of the engine's as if it had been written there."""

import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from minivllm.course import splice
from minivllm.course.manifest import ROOT
from minivllm.course.source import read_answer

ENGINE = '''
"""An engine module."""
from __future__ import annotations
import functools
from collections.abc import Iterator
from dataclasses import dataclass

LIMIT = 3

def double(x):
    return 2 * x

class Base:
    def name(self):
        return "base"

class Thing(Base):
    __slots__ = ("_value",)
    def __init__(self, value):
        self._value = value
    def name(self):
        return "thing of " + super().name()
    @property
    def value(self):
        return self._value
    @value.setter
    def value(self, new):
        self._value = new
    @staticmethod
    def make():
        return Thing(1)
    @classmethod
    def of(cls, x):
        return cls(x)
    def numbers(self) -> Iterator[int]:
        yield 1
    def __secret(self):
        return 41
    def tell(self):
        return self.__secret()

@dataclass(slots=True)
class Point:
    x: int
    def norm(self):
        return abs(self.x)

use = double
'''


def load(tmp_path: Path, *answers: str, engine: str = ENGINE) -> dict:
    """The namespace of the engine module with these answers in it."""
    paths = []
    for i, text in enumerate(answers):
        paths.append(tmp_path / f"student{i}.py")
        paths[-1].write_text("from minivllm.course import solves\n" + textwrap.dedent(text))
    module = ModuleType("engine")
    sys.modules["engine"] = module  # dataclasses look there
    try:
        exec(splice.splice(engine, "engine.py", "engine", [read_answer(p) for p in paths]), vars(module))
    finally:
        del sys.modules["engine"]
    return vars(module)


class TestConstructs:
    def test_a_function_and_names_that_were_bound_to_it(self, tmp_path):
        module = load(tmp_path, '@solves("engine:double")\ndef double(x):\n    return x + x + LIMIT')
        assert module["use"](1) == 5

    def test_super_without_arguments(self, tmp_path):
        module = load(
            tmp_path,
            """
            class Thing:
                @solves("engine:Thing.name")
                def name(self):
                    return "mine over " + super().name()
            """,
        )
        assert module["Thing"](1).name() == "mine over base"

    def test_private_names_are_mangled(self, tmp_path):
        module = load(
            tmp_path,
            """
            class Thing:
                @solves("engine:Thing.tell")
                def tell(self):
                    return self.__secret() + 1
            """,
        )
        assert module["Thing"](1).tell() == 42

    def test_static_and_class_methods_and_generators(self, tmp_path):
        module = load(
            tmp_path,
            """
            class Thing:
                @staticmethod
                @solves("engine:Thing.make")
                def make():
                    return Thing(7)
                @solves("engine:Thing.of")
                @classmethod
                def of(cls, x):
                    return cls(-x)
                @solves("engine:Thing.numbers")
                def numbers(self):
                    yield from (8, 9)
            """,
        )
        thing = module["Thing"]
        assert (thing.make().value, thing.of(3).value, list(thing(0).numbers())) == (7, -3, [8, 9])

    def test_of_a_property_and_its_setter_the_setter_is_replaced(self, tmp_path):
        module = load(
            tmp_path,
            """
            class Thing:
                @value.setter
                @solves("engine:Thing.value")
                def value(self, new):
                    self._value = -new
            """,
        )
        thing = module["Thing"](1)
        thing.value = 5
        assert thing.value == -5

    def test_a_method_of_a_slotted_dataclass(self, tmp_path):
        module = load(
            tmp_path, 'class Point:\n    @solves("engine:Point.norm")\n    def norm(self):\n        return self.x + 100'
        )
        assert module["Point"](1).norm() == 101

    def test_a_whole_class(self, tmp_path):
        module = load(
            tmp_path, '@solves("engine:Thing")\nclass Thing(Base):\n    def name(self):\n        return super().name()'
        )
        assert module["Thing"]().name() == "base"


class TestBeside:
    def test_imports_helpers_and_constants_come_along(self, tmp_path):
        module = load(
            tmp_path,
            """
            import math
            from engine import LIMIT

            FACTOR = 10

            def helper(x):
                return math.floor(x) * FACTOR

            @solves("engine:double")
            def double(x):
                return helper(x) + LIMIT
            """,
        )
        assert module["double"](2.5) == 23

    def test_helper_methods_join_the_class(self, tmp_path):
        module = load(
            tmp_path,
            """
            class Thing:
                '''Its other methods are the engine's.'''

                EXTRA = 5

                def helper(self):
                    return self.EXTRA

                @solves("engine:Thing.name")
                def name(self):
                    return self.helper()
            """,
        )
        assert module["Thing"](1).name() == 5

    def test_statements_without_a_name_run(self, tmp_path):
        module = load(tmp_path, 'import math\nmath.seen = 3\n@solves("engine:double")\ndef double(x): return math.seen')
        assert module["double"](0) == 3

    def test_main_blocks_do_not(self, tmp_path):
        load(tmp_path, '@solves("engine:double")\ndef double(x): return x\nif __name__ == "__main__":\n    1 / 0')

    def test_a_helper_may_not_replace_what_is_no_hole(self, tmp_path):
        with pytest.raises(splice.SpliceError, match="has a LIMIT of its own; choose another name"):
            load(tmp_path, 'LIMIT = 99\n@solves("engine:double")\ndef double(x): return LIMIT')

    def test_nor_a_method_that_is_no_hole(self, tmp_path):
        answer = """
            class Thing:
                def tell(self): return 0
                @solves("engine:Thing.name")
                def name(self): return ""
            """
        with pytest.raises(splice.SpliceError, match="Thing has a tell of its own"):
            load(tmp_path, answer)

    def test_importing_what_the_engine_imports_is_fine(self, tmp_path):
        load(tmp_path, 'import functools\n@solves("engine:double")\ndef double(x): return functools.reduce(max, [x])')


class TestPlaces:
    def test_tracebacks_show_the_students_file_and_line(self, tmp_path):
        module = load(
            tmp_path, '\n\n@solves("engine:double")\ndef double(x):\n    y = [1 / i for i in (1, x)]\n    return y'
        )
        with pytest.raises(ZeroDivisionError) as caught:
            module["double"](0)
        places = [(Path(str(entry.path)).name, entry.lineno + 1) for entry in caught.traceback[1:]]
        assert set(places) == {("student0.py", 6)}

    def test_the_rest_of_the_module_keeps_its_own(self, tmp_path):
        module = load(tmp_path, '@solves("engine:double")\ndef double(x): return x')
        code = module["Thing"].tell.__code__
        assert (code.co_filename, code.co_firstlineno) == (
            "engine.py",
            ENGINE.splitlines().index("    def tell(self):") + 1,
        )

    def test_two_answers_keep_their_own_files(self, tmp_path):
        module = load(
            tmp_path,
            '@solves("engine:double")\ndef double(x): return x',
            'class Thing:\n    @solves("engine:Thing.tell")\n    def tell(self): return 0',
        )
        files = [Path(f.__code__.co_filename).name for f in (module["double"], module["Thing"].tell)]
        assert files == ["student0.py", "student1.py"]

    def test_one_hole_has_one_answer(self, tmp_path):
        (tmp_path / "a.py").write_text(text := 'from minivllm.course import solves\n@solves("m:f")\ndef f(): pass\n')
        (tmp_path / "b.py").write_text(text)
        with pytest.raises(splice.SpliceError, match="name one of them"):
            splice.Finder.read([tmp_path / "a.py", tmp_path / "b.py"])


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_engine_modules_that_import_the_hole_get_the_students():
    out = python(
        """
        from pathlib import Path
        from minivllm.course import splice
        splice.install([Path("solutions/kv_02_longest_hit.py")])
        import minivllm.kv.manager
        print(Path(minivllm.kv.manager.longest_hit.__code__.co_filename).name)
        """
    )
    assert out == "kv_02_longest_hit.py"


def test_spawned_workers_get_it_too():
    out = python(
        """
        import os, subprocess, sys
        from pathlib import Path
        from minivllm.course import splice
        splice.install([Path("solutions/kv_01_block_pool.py")])
        code = "import minivllm.kv.block_pool as b; print(b.BlockPool.free.__code__.co_filename)"
        print(Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()).name)
        """
    )
    assert out == "kv_01_block_pool.py"


def test_it_is_too_late_once_the_engine_is_there():
    out = python(
        """
        from pathlib import Path
        import minivllm.kv.prefix
        from minivllm.course import splice
        try:
            splice.install([Path("solutions/kv_02_longest_hit.py")])
        except splice.SpliceError as error:
            print(error)
        """
    )
    assert "imported already" in out


def test_of_a_folder_untouched_stubs_are_left_out(tmp_path):
    (tmp_path / "a.py").write_text((ROOT / "solutions/kv_01_block_pool.py").read_text())
    (tmp_path / "b.py").write_text((ROOT / "exercises/kv_02_longest_hit.py").read_text())
    files = splice.Finder.read([tmp_path]).files
    assert [file.name for file in files] == ["a.py"] or "NotImplementedError" not in (tmp_path / "b.py").read_text()
