"""The C++ kernels compute what the torch code of the same name defines, touch nothing else, and refuse what they can't do."""

import logging
import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import ConfigError
from minivllm.models import layers
from minivllm.runner import attention
from minivllm.runner.attention import attend_one, pick_backend
from minivllm_kernels import cpu
from minivllm_kernels.cpu import build

needs_kernels = pytest.mark.skipif(bool(cpu.why_not()), reason=f"no C++ kernels: {cpu.why_not()}")
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # bfloat16 keeps 8 bits


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@needs_kernels
class TestLayers:
    @given(dtypes, st.integers(0, 70), st.integers(1, 700), st.booleans())
    def test_norms(self, dtype, tokens, size, add):
        x, update, weight = random(torch.float32, tokens, size), random(dtype, tokens, size), random(dtype, size)
        mine, theirs = x.clone(), x.clone()
        if add:
            got = cpu.add_rms_norm(mine, update, weight, 1e-5)
            wanted = layers.add_rms_norm(theirs, update, weight, 1e-5)
        else:
            got, wanted = cpu.rms_norm(mine, weight, 1e-5), layers.rms_norm(theirs, weight, 1e-5)
        close(got, wanted)
        assert torch.equal(mine, theirs)

    @given(dtypes, st.integers(0, 70), st.integers(1, 40))
    def test_gated_silu(self, dtype, tokens, size):
        gate_up = 4 * random(dtype, tokens, 2 * size * cpu.VECTOR)
        close(cpu.gated_silu(gate_up), layers.gated_silu(gate_up))

    def test_gated_silu_far_from_zero(self):
        gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]).repeat(4)
        got = cpu.gated_silu(torch.cat((gate, torch.ones(32)))[None])
        torch.testing.assert_close(got, torch.nn.functional.silu(gate)[None], rtol=1e-5, atol=1e-7)

    @given(dtypes, st.integers(0, 70), st.integers(1, 9), st.sampled_from([2, 16, 64, 128]), st.booleans())
    def test_rotate(self, dtype, tokens, heads, dim, sliced):
        x = random(dtype, tokens, heads + 2, dim)[:, : heads + 2 * (not sliced)]
        cos, sin = random(dtype, tokens, 1, dim), random(dtype, tokens, 1, dim)
        # torch rounds to bfloat16 between its two products
        torch.testing.assert_close(cpu.rotate(x, cos, sin), layers.rotate(x, cos, sin), rtol=0.02, atol=0.05)

    @given(st.lists(st.floats(width=32), min_size=1, max_size=64))
    def test_rounding_to_bfloat16_is_torchs(self, values):
        gate = torch.tensor(values + [1.0] * (-len(values) % 32))
        rows = len(gate) // 32
        weight = torch.ones(32, dtype=torch.bfloat16)
        x = gate.view(rows, 32)
        got = cpu.rms_norm(x, weight, 1e-5)
        assert torch.equal(got.isnan(), cpu.rms_norm(x, weight.float(), 1e-5).isnan())
        assert torch.equal(got.nan_to_num(), cpu.rms_norm(x, weight.float(), 1e-5).to(torch.bfloat16).nan_to_num())


@st.composite
def paged(draw):
    """Rows of one token over permuted blocks; NaN in every slot that no row may read."""
    dtype = draw(dtypes)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim, block_size = draw(st.sampled_from([32, 64, 96, 128])), draw(st.sampled_from([1, 4, 16]))
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    widths = [-(-length // block_size) for length in lengths]
    tables = torch.zeros(len(lengths), max(widths), dtype=torch.int64)
    blocks = torch.randperm(sum(widths)) + 1  # block 0 is the null block
    for row, own in enumerate(blocks.split(widths)):
        tables[row, : len(own)] = own
    cache = torch.full((2 * kv_heads, (len(blocks) + 1) * block_size, dim), torch.nan, dtype=dtype)
    for row, length in enumerate(lengths):
        cache[:, slots_of(tables[row], length, block_size)] = random(dtype, 2 * kv_heads, length, dim)
    return cache, tables, lengths, block_size, random(dtype, len(lengths), kv_heads * group, dim)


def slots_of(table: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    return (table[:, None] * block_size + torch.arange(block_size)).flatten()[:length]


@needs_kernels
class TestAttention:
    @given(paged(), st.none() | st.integers(1, 80))
    def test_decodes_read_their_own_slots_in_place(self, case, window):
        cache, tables, lengths, block_size, q = case
        before = cache.clone()
        out, tokens = torch.full_like(q, torch.nan), torch.arange(len(lengths)).flip(0)
        cpu.paged_decode(q, cache, tokens, tables, torch.tensor(lengths), block_size, out, window)
        for row, length in enumerate(lengths):
            slots = slots_of(tables[row], length, block_size)[-(window or length) :]
            keys, values = cache[:, slots].transpose(0, 1).chunk(2, 1)
            close(out[tokens[row]], attend_one(q[tokens[row]], keys, values).to(q.dtype))
        assert torch.equal(cache.nan_to_num(), before.nan_to_num())

    @given(dtypes, st.integers(0, 40), st.integers(1, 3), st.sampled_from([32, 64]))
    def test_store_kv_writes_its_slots_and_no_other(self, dtype, tokens, heads, dim):
        wide = random(dtype, tokens, 3 * heads, dim)
        k, v = wide[:, :heads], wide[:, 2 * heads :]
        cache = random(dtype, 2 * heads, tokens + 5, dim)
        slots = torch.randperm(tokens + 5)[:tokens]
        wanted = cache.index_copy(1, slots, torch.cat((k, v), 1).transpose(0, 1))
        cpu.store_kv(k, v, slots, cache)
        assert torch.equal(cache, wanted)


@needs_kernels
class TestBadArguments:
    """Each raises, naming the argument, before anything is written."""

    CACHE = torch.zeros(4, 32, 64)
    Q = torch.zeros(2, 4, 64)
    ROWS = torch.zeros(2, dtype=torch.int64)
    TABLES = torch.zeros(2, 2, dtype=torch.int64)
    GOOD = (Q, CACHE, ROWS, TABLES, ROWS + 1, 16, Q.clone())

    @pytest.mark.parametrize(
        ("position", "value", "name"),
        [
            (0, Q.double(), "q"),
            (0, Q.transpose(1, 2), "q"),
            (1, CACHE.to(torch.bfloat16), "q"),
            (1, CACHE[:, ::2], "cache"),
            (1, torch.zeros(6, 32, 64), "cache"),
            (2, ROWS.int(), "tokens"),
            (3, TABLES[:1], "tables"),
            (4, ROWS[:1], "lengths"),
            (6, Q.transpose(0, 1), "out"),
            (6, Q.to("meta"), "out"),
        ],
    )
    def test_paged_decode(self, position, value, name):
        arguments = [*self.GOOD[:position], value, *self.GOOD[position + 1 :]]
        with pytest.raises(ValueError, match=f"^{name}:"):
            cpu.paged_decode(*arguments)

    def test_a_head_size_that_vectors_do_not_divide(self):
        with pytest.raises(ValueError, match="head size 40"):
            cpu.paged_decode(
                self.Q[..., :40].contiguous(), self.CACHE[..., :40].contiguous(), *self.GOOD[2:6], torch.zeros(2, 4, 40)
            )

    def test_layers(self):
        x, weight = torch.zeros(2, 64), torch.zeros(64)
        for name, call in {
            "x": lambda: cpu.rms_norm(x.double(), weight, 1e-5),
            "weight": lambda: cpu.rms_norm(x, weight[:32], 1e-5),
            "update": lambda: cpu.add_rms_norm(x, x[:1], weight, 1e-5),
            "gate_up": lambda: cpu.gated_silu(x[:, :40].contiguous()),
            "cos": lambda: cpu.rotate(self.Q, torch.zeros(2, 64), torch.zeros(2, 1, 64)),
            "slots": lambda: cpu.store_kv(self.Q[:, :2], self.Q[:, 2:], self.ROWS[:1], self.CACHE),
            "v": lambda: cpu.store_kv(self.Q[:, :2], self.Q, self.ROWS, self.CACHE),
        }.items():
            with pytest.raises(ValueError, match=f"^{name}:"):
                call()


class Model:
    """What `pick_backend` asks of a model."""

    def __init__(self, dtype=torch.float32, head_dim=64, device="cpu"):
        self.dtype, self.device = dtype, torch.device(device)
        self.config = type("C", (), {"head_dim": head_dim, "intermediate_size": 64})


class TestFallback:
    @pytest.fixture(autouse=True)
    def nothing_said_yet(self):
        attention.log_fallback.cache_clear()

    @pytest.mark.parametrize(
        ("model", "reason"),
        [(Model(torch.float64), "dtype"), (Model(head_dim=24), "head size 24"), (Model(device="meta"), "runs on meta")],
    )
    def test_torch_takes_over_and_the_log_says_why(self, model, reason, caplog):
        caplog.set_level(logging.INFO, attention.__name__)
        assert pick_backend("auto", model.device.type, model).name == "torch"
        assert reason in caplog.text
        with pytest.raises(ConfigError, match=reason):
            pick_backend("cpp", model.device.type, model)

    def test_no_compiler(self, monkeypatch, caplog):
        caplog.set_level(logging.INFO, attention.__name__)
        monkeypatch.setattr(cpu, "why_not", lambda device: "no C++ compiler here")
        assert pick_backend("auto", Model().device.type, Model()).name == "torch"
        assert "no C++ compiler" in caplog.text

    def test_a_compiler_that_does_not_work(self, monkeypatch, tmp_path):
        broken = tmp_path / "cxx"
        broken.write_text("#!/bin/sh\necho out of order >&2; exit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
        with pytest.raises(build.KernelsUnavailable, match="out of order"):
            build.library.__wrapped__()

    @needs_kernels
    def test_a_compilers_command_may_have_arguments(self, monkeypatch):
        monkeypatch.delenv("CXX", raising=False)
        (compiler,) = build.find_compiler()
        monkeypatch.setenv("CXX", f"env LC_ALL=C {compiler}")
        assert build.find_compiler()[1:] == ["LC_ALL=C", compiler]
        assert "__x86_64__" in build.describe_target(build.find_compiler()).decode() or platform.machine() != "x86_64"

    @pytest.mark.parametrize("given", ["", "  "])
    def test_an_empty_cxx_is_none(self, monkeypatch, given):
        monkeypatch.setenv("CXX", given)
        monkeypatch.setattr(build, "COMPILERS", ())
        with pytest.raises(build.KernelsUnavailable, match=r"g\+\+ or clang\+\+"):
            build.find_compiler()

    def test_a_cxx_that_is_not_there_is_named(self, monkeypatch):
        monkeypatch.setenv("CXX", "no-such-compiler -v")
        with pytest.raises(build.KernelsUnavailable, match=r"\$CXX is no-such-compiler -v"):
            build.find_compiler()

    @needs_kernels
    def test_a_cache_that_cannot_be_written_is_a_reason_and_says_what_to_do(self, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "file"))
        with pytest.raises(build.KernelsUnavailable, match=r"file.*\$MINIVLLM_CACHE"):
            build.library.__wrapped__()

    @needs_kernels
    def test_no_home_is_a_reason(self, homeless):
        with pytest.raises(build.KernelsUnavailable, match="home"):
            build.library.__wrapped__()

    @needs_kernels
    def test_a_build_is_whole_or_not_there(self, monkeypatch, tmp_path):
        monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
        build.library.__wrapped__()
        assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]
        monkeypatch.setattr(build, "SOURCE", tmp_path / "bad.cpp")
        build.SOURCE.write_text("int main( {")
        with pytest.raises(build.KernelsUnavailable, match="can't compile"):
            build.library.__wrapped__()
        assert len(list((tmp_path / "kernels").iterdir())) == 1
