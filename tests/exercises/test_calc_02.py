"""calc-02: unused slots of paged sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.calc.memory import paged_waste
from minivllm.course.expect import must_raise


def part(name: str) -> pytest.MarkDecorator:
    return pytest.mark.part("calc-02", name)


@part("the last block lacks what its sequence doesn't fill")
class TestLastBlock:
    @pytest.mark.parametrize(("length", "waste"), [(1, 15), (15, 1), (17, 15), (31, 1), (1000, 8)])
    def test_one_sequence(self, length, waste):
        assert paged_waste([length], 16) == waste, (
            f"{length} tokens in blocks of 16 leave {waste} slots of the last one"
        )

    def test_each_sequence_has_its_own_last_block(self):
        assert paged_waste([8, 8], 16) == 16, "two half blocks of two sequences aren't one full block"

    def test_the_mean_is_not_enough(self):
        assert paged_waste([1, 15], 16) == 16, "lengths count, not their mean"

    def test_other_block_sizes(self):
        assert paged_waste((5, 7, 100), 3) == 1 + 2 + 2, "5, 7 and 100 tokens in blocks of 3"


@part("a full block wastes nothing, and no token needs no block")
class TestNothing:
    @pytest.mark.parametrize("lens", [[16], [32, 48], [1600]])
    def test_full_blocks(self, lens):
        assert paged_waste(lens, 16) == 0, "no further block is taken before a token needs it"

    @pytest.mark.parametrize("lens", [[], [0], [0, 0, 16]])
    def test_empty(self, lens):
        assert paged_waste(lens, 16) == 0, "a sequence without tokens holds no block"

    def test_blocks_of_one(self):
        assert paged_waste([3, 0, 17], 1) == 0, "a block of one slot is full when it is taken"


@part("sizes and lengths that make no sense are refused")
class TestRefused:
    @pytest.mark.parametrize(("lens", "block_size"), [([1], 0), ([1], -16), ([-1], 16), ([17, -17], 16), ([], 0)])
    def test_with_a_value_error(self, lens, block_size):
        with must_raise(ValueError, f"paged_waste({lens}, {block_size})"):
            paged_waste(lens, block_size)


lengths = st.lists(st.integers(0, 5000), max_size=20)
block_sizes = st.integers(1, 300)


@part("for any lengths, used and wasted slots make whole blocks, and no block is only waste")
class TestAny:
    @given(lengths, block_sizes)
    def test_whole_blocks(self, lens, block_size):
        assert (sum(lens) + paged_waste(lens, block_size)) % block_size == 0, "slots come in whole blocks"

    @given(lengths, block_sizes)
    def test_less_than_a_block_each(self, lens, block_size):
        busy = sum(length > 0 for length in lens)
        waste, most = paged_waste(lens, block_size), (block_size - 1) * busy
        assert 0 <= waste <= most, f"every block holds at least one token: {waste} slots wasted, but {most} at most"

    @given(lengths, block_sizes, st.randoms())
    def test_order_does_not_matter(self, lens, block_size, random):
        shuffled = random.sample(lens, len(lens))
        assert paged_waste(shuffled, block_size) == paged_waste(lens, block_size), (
            f"{shuffled} and {lens} are the same sequences and waste the same"
        )

    @given(lengths, st.integers(1, 100))
    def test_halving_blocks_never_wastes_more(self, lens, half):
        small, large = paged_waste(lens, half), paged_waste(lens, 2 * half)
        assert small <= large, f"blocks of {half} waste {small} slots and blocks of {2 * half} only {large}"
