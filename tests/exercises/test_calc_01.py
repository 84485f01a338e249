"""calc-01: the speed of a model that lies in two memories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.calc.roofline import spill_tps
from minivllm.course.expect import must_raise

near = pytest.approx


def part(name: str) -> pytest.MarkDecorator:
    return pytest.mark.part("calc-01", name)


@part("a model that fits is read at the GPU's speed, one without room at the host's")
class TestOneMemory:
    @pytest.mark.parametrize("room", [10e9, 10.5e9, 80e9])
    def test_it_fits(self, room):
        assert spill_tps(10e9, room, 1e12, 50e9) == near(100), "all of it is on the GPU: bandwidth over bytes"

    def test_no_room(self):
        assert spill_tps(10e9, 0, 1e12, 50e9) == near(5), "all of it is on the host: bandwidth over bytes"


@part("the times of both memories add")
class TestTimesAdd:
    def test_half_and_half(self):
        assert spill_tps(10e9, 5e9, 1e12, 50e9) == near(1 / (5e-3 + 100e-3)), (
            "5 GB take 5 ms on the GPU and 5 GB take 100 ms on the host: a token takes 105 ms"
        )

    def test_equal_memories_are_one_memory(self):
        assert spill_tps(10e9, 3e9, 50e9, 50e9) == near(5), (
            "where both are equally fast it doesn't matter what lies where"
        )

    def test_a_70b_in_4_bits_with_22_gb_on_a_card(self):
        assert spill_tps(42.52e9, 22e9, 1008e9, 80e9) == near(3.59, rel=0.002), "22 GB at 1008 GB/s, 20.5 GB at 80 GB/s"

    def test_the_gpu_may_be_the_slower_one(self):
        assert spill_tps(10e9, 5e9, 50e9, 1e12) == near(1 / (100e-3 + 5e-3)), "the GPU is filled first, fast or not"


@part("a mixture reads its active bytes only, in the same proportion from both")
class TestActive:
    def test_all_on_the_gpu(self):
        assert spill_tps(60e9, 80e9, 1e12, 50e9, active_bytes=3e9) == near(1e12 / 3e9), (
            "3 of 60 GB are read for a token"
        )

    def test_spilled(self):
        assert spill_tps(60e9, 30e9, 1e12, 50e9, active_bytes=6e9) == near(1 / (3e-3 + 60e-3)), (
            "half of all experts is on the GPU, so half of the active bytes is read from it"
        )

    def test_room_for_all_active_bytes_is_not_enough(self):
        assert spill_tps(60e9, 15e9, 1e12, 50e9, active_bytes=6e9) == near(1 / (1.5e-3 + 90e-3)), (
            "which experts a token visits isn't known before: they can't all be put on the GPU"
        )

    def test_a_dense_model_reads_everything(self):
        assert spill_tps(10e9, 5e9, 1e12, 50e9, active_bytes=10e9) == near(spill_tps(10e9, 5e9, 1e12, 50e9)), (
            "a model whose active bytes are all its bytes is a dense one"
        )


@part("sizes and speeds that make no sense are refused")
class TestRefused:
    @pytest.mark.parametrize(
        "arguments",
        [
            (0, 1, 1, 1), (-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, -1, 1), (1, 1, 1, 0), (1, 1, 1, -1),
            (1, 1, 1, 1, 0), (1, 1, 1, 1, -1), (1, 1, 1, 1, 1.01),
        ],
    )  # fmt: skip
    def test_with_a_value_error(self, arguments):
        with must_raise(ValueError, f"spill_tps{arguments}"):
            spill_tps(*arguments)

    def test_but_no_room_at_all_makes_sense(self):
        assert spill_tps(1, 0, 1, 1) == near(1), "gpu_bytes = 0 is a machine without a GPU"


sizes = st.floats(1e6, 1e13)
shares = st.floats(0, 1.5)


@part("for any machine the speed lies between its memories', and more room on the faster never slows it")
class TestAny:
    @given(sizes, shares, sizes, sizes)
    def test_between(self, model, share, gpu, host):
        slow, fast = sorted([gpu / model, host / model])
        tps = spill_tps(model, share * model, gpu, host)
        assert slow * (1 - 1e-9) <= tps <= fast * (1 + 1e-9), (
            f"{tps:g} tokens/s, but the memories alone would give {slow:g} and {fast:g}: it must be between"
        )

    @given(sizes, shares, shares, sizes, st.floats(0.001, 1))
    def test_room(self, model, one, other, gpu, slower):
        less, more = (spill_tps(model, share * model, gpu, slower * gpu) for share in sorted([one, other]))
        assert less <= more * (1 + 1e-9), f"more room on the faster memory, and {less:g} tokens/s became {more:g}"

    @given(sizes, shares, st.floats(0.001, 1), sizes, sizes)
    def test_reading_a_part_is_faster_by_that_part(self, model, share, active, gpu, host):
        whole = spill_tps(model, share * model, gpu, host)
        assert spill_tps(model, share * model, gpu, host, active * model) == near(whole / active), (
            "speed is inversely proportional to the bytes that a token reads"
        )
