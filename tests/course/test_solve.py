"""`%%solve`: a notebook cell takes the engine's place, wherever the engine has the name."""

import subprocess
import sys
import textwrap

import pytest

from minivllm.course.manifest import CourseError, load_manifest
from minivllm.course.solve import load_ipython_extension, solve


def in_a_fresh_process(code: str) -> str:
    """What it changes stays changed, so each try has an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_function_is_replaced_wherever_it_was_imported():
    printed = in_a_fresh_process("""
        from minivllm.course.manifest import load_manifest
        from minivllm.course.solve import solve
        from minivllm.kv import manager
        solve(load_manifest()["kv-02"], "def longest_hit(hashes, num_tokens, block_size, index):\\n    return 'mine'")
        print(manager.longest_hit([], 0, 0, None))
    """)
    assert printed == "mine"


def test_a_method_is_replaced_in_the_engines_class_and_sees_the_modules_names():
    printed = in_a_fresh_process('''
        from minivllm.course.manifest import load_manifest
        from minivllm.course.solve import solve
        from minivllm.kv.block_pool import BlockPool
        solve(load_manifest()["kv-01"], """
        class BlockPool:
            @solves("minivllm.kv.block_pool:BlockPool.allocate")
            def allocate(self, n):
                return [Block(100 + i) for i in range(n)]
        """)
        pool = BlockPool(4)
        print([block.id for block in pool.allocate(2)], pool.num_free)
    ''')
    assert printed == "[100, 101] 3"


def test_a_cell_that_defines_nothing_of_the_exercise_is_refused():
    with pytest.raises(CourseError, match="defines none of hash_block, extend_hashes, longest_hit"):
        solve(load_manifest()["kv-02"], "x = 1")


def test_the_extension_registers_the_magic_and_an_unknown_exercise_is_refused():
    registered = {}

    class Shell:
        def register_magic_function(self, function, magic_kind, magic_name):
            registered[magic_name] = (magic_kind, function)

    load_ipython_extension(Shell())
    kind, function = registered["solve"]
    assert kind == "cell"
    with pytest.raises(CourseError, match="kv-99"):
        function("kv-99", "x = 1")
