"""kv-02: a block's hash stands for its whole prefix, and lookup finds the longest one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.kv.block_pool import Block, BlockPool
from minivllm.kv.prefix import ROOT_HASH, extend_hashes, hash_block, longest_hit


def part(name: str) -> pytest.MarkDecorator:
    return pytest.mark.part("kv-02", name)


def hashes_of(tokens, block_size: int, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, salt)
    return hashes


class Everything:
    """An index in which every hash is published."""

    def find(self, block_hash: bytes) -> Block:
        return Block(1, ref_count=1, hash=block_hash)


class Published:
    """An index of the hashes given, in blocks 1, 2, ..."""

    def __init__(self, hashes: list[bytes]):
        self.blocks = {h: Block(i, hash=h) for i, h in enumerate(hashes, 1)}

    def find(self, block_hash: bytes) -> Block | None:
        return self.blocks.get(block_hash)


@part("a hash stands for the block and everything before it")
class TestChain:
    def test_the_same_tokens_after_another_prefix_are_another_block(self):
        other = hash_block(ROOT_HASH, [9, 9])
        assert hash_block(ROOT_HASH, [1, 2]) != hash_block(other, [1, 2]), "the hash must depend on the parent's"

    def test_changing_the_first_token_changes_every_hash(self):
        old, new = hashes_of(range(64), 16), hashes_of([99, *range(1, 64)], 16)
        assert not set(old) & set(new), "after another first token no block may be found again"

    @pytest.mark.parametrize("k", [0, 1, 2, 3])
    def test_changing_the_last_token_of_block_k_keeps_the_k_before_it(self, k):
        tokens = list(range(64))
        tokens[16 * k + 15] = 99
        same = [a == b for a, b in zip(hashes_of(range(64), 16), hashes_of(tokens, 16), strict=True)]
        assert same == [i < k for i in range(4)], f"a change at the end of block {k} must keep exactly {k} hashes"

    def test_the_first_block_hangs_on_the_root(self):
        assert hashes_of([1, 2], 2) == [hash_block(ROOT_HASH, [1, 2])], "the first block's parent is ROOT_HASH"

    def test_two_salts_share_no_block(self):
        a, b = hashes_of(range(8), 2, "alice"), hashes_of(range(8), 2, "bob")
        assert not set(a) & set(b), "tenants with different salts must not see each other's blocks, at any depth"

    def test_the_salt_goes_into_the_first_block_only(self):
        first, second = hashes_of([1, 2, 3, 4], 2, "alice")
        assert second == hash_block(first, [3, 4]), "later blocks get the salt through the chain, not again"

    def test_equal_inputs_give_equal_hashes_of_32_bytes(self):
        assert hash_block(ROOT_HASH, (1, 2), "s") == hash_block(ROOT_HASH, [1, 2], "s"), (
            "the type of sequence is no matter"
        )
        assert len(hash_block(ROOT_HASH, [1, 2])) == 32, "a hash has 32 bytes"


@part("different inputs never look the same to the hash")
class TestNoAmbiguity:
    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (([1, 23], ""), ([12, 3], "")),
            (([1, 2], ""), ([12], "")),
            (([258], ""), ([2, 1], "")),
            (([65_537], ""), ([1], "")),
            (([2**32 + 5], ""), ([5], "")),
            (([1, 2], ""), ([2, 1], "")),
            (([1, 2], "3"), ([3, 1, 2], "")),
            (([2], "1"), ([1, 2], "")),
            (([98], "a"), ([], "ab")),
            (([2], (1).to_bytes(8, "little").decode()), ([1, 2], "")),
            (([2], (1).to_bytes(4, "little").decode()), ([1, 2], "")),
        ],
    )
    def test_neither_digits_nor_bytes_run_together(self, left, right):
        message = f"tokens {left[0]} with salt {left[1]!r} and tokens {right[0]} with salt {right[1]!r} get one hash"
        assert hash_block(ROOT_HASH, left[0], left[1]) != hash_block(ROOT_HASH, right[0], right[1]), message

    @given(
        st.lists(
            st.tuples(
                st.lists(st.sampled_from([0, 1, 2, 11, 12, 112, 300]), max_size=4),
                st.sampled_from(["", "1", "12", ",", "\0"]),
            ),
            min_size=2,
            max_size=8,
        )
    )
    def test_one_hash_for_each_input(self, inputs):
        different = {(tuple(tokens), salt) for tokens, salt in inputs}
        seen: dict[bytes, str] = {}
        for tokens, salt in sorted(different):
            block_hash, name = hash_block(ROOT_HASH, tokens, salt), f"tokens {list(tokens)} with salt {salt!r}"
            assert block_hash not in seen, f"{seen[block_hash]} and {name} get one hash"
            seen[block_hash] = name


@part("full blocks get a hash, once; a partial one gets none")
class TestExtend:
    @pytest.mark.parametrize(
        ("num_tokens", "full"), [(0, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (33, 2), (1000, 62)]
    )
    def test_only_full_blocks(self, num_tokens, full):
        got = len(hashes_of(range(num_tokens), 16))
        assert got == full, f"{num_tokens} tokens fill {full} blocks of 16, but the list given got {got} hashes"

    def test_what_is_there_is_kept_and_built_on(self):
        known = hash_block(ROOT_HASH, [7, 7])
        hashes = [known]
        extend_hashes(hashes, [1, 2, 3, 4], 2)
        assert hashes[0] is known, "hashes that are there already must not be computed again"
        assert hashes[1:] == [hash_block(known, [3, 4])], "a new hash builds on the last one that is there"

    @given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 4), st.sampled_from(["", "salt"]))
    def test_token_by_token_is_the_same_as_all_at_once(self, tokens, block_size, salt):
        slowly: list[bytes] = []
        for n in range(len(tokens) + 1):
            extend_hashes(slowly, tokens[:n], block_size, salt)
            wanted = hashes_of(tokens[:n], block_size, salt)
            case = f"called after each of {n} tokens, with blocks of {block_size}: "
            assert len(slowly) == len(wanted), f"{case}{len(slowly)} hashes, but {len(wanted)} when called once for all"
            for i in range(len(wanted)):
                assert slowly[i] == wanted[i], f"{case}the hash of block {i} is another than when called once for all"


@part("the last token is always left to compute")
class TestLastToken:
    @pytest.mark.parametrize(
        ("num_tokens", "hit"), [(0, 0), (1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (1000, 992)]
    )
    def test_everything_is_cached(self, num_tokens, hit):
        blocks = longest_hit(hashes_of(range(num_tokens), 16), num_tokens, 16, Everything())
        used = len(blocks) * 16
        case = f"all {num_tokens} tokens are cached in blocks of 16, and {used} are taken from the cache: "
        assert used <= hit, f"{case}too many, one must be left to compute, so whole blocks hold at most {hit}"
        assert used >= hit, f"{case}too few, whole blocks hold {hit} and leave a token to compute"

    def test_also_with_blocks_of_one_token(self):
        got = len(longest_hit(hashes_of([1, 2, 3], 1), 3, 1, Everything()))
        assert got == 2, f"of 3 cached tokens in blocks of 1 the first 2 come from the cache, not {got}"

    def test_only_the_tokens_asked_for(self):
        blocks = longest_hit(hashes_of(range(64), 16), 40, 16, Everything())
        assert len(blocks) == 2, (
            f"num_tokens 40 and blocks of 16: 2 blocks may be hit, though 4 are hashed, not {len(blocks)}"
        )


@part("looking up stops at the first miss and changes nothing")
class TestLookup:
    def test_blocks_come_in_order(self):
        hashes = hashes_of(range(65), 16)
        assert [b.id for b in longest_hit(hashes, 65, 16, Published(hashes))] == [1, 2, 3, 4], (
            "all four blocks are cached and must come, in prefix order"
        )

    @pytest.mark.parametrize("gap", [0, 1, 2, 3])
    def test_what_follows_a_gap_is_of_no_use(self, gap):
        hashes = hashes_of(range(65), 16)
        index = Published(hashes)
        del index.blocks[hashes[gap]]
        got = len(longest_hit(hashes, 65, 16, index))
        assert got == gap, f"4 blocks, of which block {gap} was evicted: the {gap} before it can be hit, but {got} came"

    def test_nobody_notices(self):
        pool = BlockPool(6)
        hashes = hashes_of(range(9), 2)
        for block, block_hash in zip(blocks := pool.allocate(4), hashes, strict=True):
            pool.publish(block, block_hash)
        pool.free(blocks[::-1])
        before = [(b.id, b.ref_count, b.hash) for b in pool.blocks], [b.id for b in pool.free_list], list(hashes)
        longest_hit(hashes, 9, 2, pool)
        after = [(b.id, b.ref_count, b.hash) for b in pool.blocks], [b.id for b in pool.free_list], list(hashes)
        assert after == before, "a lookup takes no references and moves nothing: the request may not be admitted at all"


texts = st.lists(st.integers(0, 1), max_size=9)
salts = st.sampled_from(["", "", "x"])
some_cached = st.lists(st.tuples(texts, salts), min_size=1, max_size=4)
some_numbers = st.sets(st.integers(1, 12), max_size=2)
keeps = st.integers(9, 9) | st.integers(0, 8)
tails = st.builds(list) | st.lists(st.integers(0, 1), max_size=4)


@part("a hit is exactly the longest prefix that is cached")
@given(some_cached, some_numbers, st.integers(0, 3), keeps, tails, st.integers(1, 3))
def test_against_a_search_through_plain_tokens(cached, evicted, like, keep, tail, block_size):
    """Texts are cached, some blocks evicted; the prompt begins with `keep` tokens of one of the texts, and has its salt."""
    content: dict[int, tuple] = {}
    index = Published([])
    for tokens, salt in cached:
        hashes, full = hashes_of(tokens, block_size, salt), len(tokens) // block_size
        assert len(hashes) == full, (
            f"the {full} full blocks of {tokens} in blocks of {block_size} got {len(hashes)} hashes"
        )
        for i, block_hash in enumerate(hashes):
            if index.find(block_hash) is None:
                block = Block(len(content) + 1, hash=block_hash)
                index.blocks[block_hash] = block
                content[block.id] = salt, tuple(tokens[: (i + 1) * block_size])
    for block in list(index.blocks.values()):
        if block.id in evicted:
            del index.blocks[block.hash], content[block.id]
    base, salt = cached[like % len(cached)]
    prompt = [*base[:keep], *tail]
    prefixes = [(salt, tuple(prompt[:n])) for n in range(block_size, len(prompt), block_size)]
    wanted = next((i for i, prefix in enumerate(prefixes) if prefix not in content.values()), len(prefixes))
    hits = longest_hit(hashes_of(prompt, block_size, salt), len(prompt), block_size, index)
    case = f"prompt {prompt}, salt {salt!r}, blocks of {block_size}, cached {in_words(content)}: "
    assert len(hits) == wanted, f"{case}blocks to hit: {wanted}, but {len(hits)} came"
    for i, (block, prefix) in enumerate(zip(hits, prefixes, strict=False)):
        got = content[block.id]
        assert got == prefix, f"{case}hit {i} must be the block that ends {list(prefix[1])}, not {list(got[1])}"


def in_words(content: dict[int, tuple]) -> str:
    """The cached blocks, each by all tokens up to its end."""
    return " and ".join(f"{list(prefix)} (salt {salt!r})" for salt, prefix in content.values()) or "nothing"
