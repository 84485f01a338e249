"""Shapes of well-known models, and what follows from them: parameters, bytes of weights, bytes of KV a token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts part of every layer: `total` experts of width `width`, of which a token visits `active`."""

    total: int
    active: int
    width: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder-only model with grouped-query attention and a gated MLP. Sizes in elements.

    `max_position` is the longest request the model was made for, in tokens: `max_position_embeddings` of its
    config. `intermediate_size` is the width of the dense MLP, 0 in a mixture of experts. `qk_norm`: Qwen3's norms of
    query and key heads. `biases`: gpt-oss's biases on every projection, router and expert, and one sink a head.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tied: bool = False
    experts: Experts | None = None
    qk_norm: bool = False
    biases: bool = False
    window_pattern: tuple[int | None, ...] = (None,)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window in tokens; None where a token attends to everything before it."""
        return tuple(islice(cycle(self.window_pattern), self.num_layers))

    @property
    def parameters(self) -> int:
        """All parameters, the embedding counted once when it is tied to the output."""
        return self._count(self.experts.total if self.experts else 0)

    @property
    def active_parameters(self) -> int:
        """Parameters one token goes through: `parameters`, but only the experts it visits."""
        return self._count(self.experts.active if self.experts else 0)

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes of K and V that one token takes in all layers: 2 x layers x KV heads x head_dim x bytes.

        Layers with a window keep them for a while only: see `calc.memory.hybrid_kv`.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes

    def _count(self, experts: int) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.num_layers * (self._attention() + self._mlp(experts)) + self.hidden_size

    def _attention(self) -> int:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = queries + 2 * keys + self.hidden_size + self.num_heads if self.biases else 0
        return 2 * self.hidden_size * (queries + keys) + norms + biases

    def _mlp(self, experts: int) -> int:
        if self.experts is None:
            return 3 * self.hidden_size * self.intermediate_size
        router = (self.hidden_size + self.biases) * self.experts.total
        biases = 2 * self.experts.width + self.hidden_size if self.biases else 0
        return router + experts * (3 * self.hidden_size * self.experts.width + biases)


def mla_kv_bytes_per_token(num_layers: int, latent: int, rope: int, element_bytes: int = 2) -> int:
    """KV bytes a token of multi-head latent attention: one latent and one rotary key a layer, whatever the heads."""
    return num_layers * (latent + rope) * element_bytes


# Positions as in Llama 3.1 and 3.3. Llama 3, of the same shape, has 8,192.
LLAMA_3_8B = Shape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
LLAMA_3_70B = Shape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072)
LLAMA_31_405B = Shape("Llama-3.1-405B", 126, 16384, 128, 8, 128, 53248, 128256, 131072)
QWEN3_06B = Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, 40960, tied=True, qk_norm=True)
QWEN3_17B = Shape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, 40960, tied=True, qk_norm=True)
QWEN3_4B = Shape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, 40960, tied=True, qk_norm=True)
QWEN3_8B = Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 40960, qk_norm=True)
QWEN3_14B = Shape("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, 40960, qk_norm=True)
QWEN3_32B = Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25600, 151936, 40960, qk_norm=True)
QWEN3_30B_A3B = Shape(
    "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 0, 151936, 40960, experts=Experts(128, 8, 768), qk_norm=True
)  # fmt: skip
QWEN3_235B_A22B = Shape(
    "Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 0, 151936, 40960, experts=Experts(128, 8, 1536), qk_norm=True
)  # fmt: skip
GPT_OSS_20B = Shape(
    "gpt-oss-20b", 24, 2880, 64, 8, 64, 0, 201088, 131072, experts=Experts(32, 4, 2880), biases=True,
    window_pattern=(128, None),
)  # fmt: skip
GPT_OSS_120B = Shape(
    "gpt-oss-120b", 36, 2880, 64, 8, 64, 0, 201088, 131072, experts=Experts(128, 4, 2880), biases=True,
    window_pattern=(128, None),
)  # fmt: skip
SMOLLM2_135M = Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True)

SHAPES = (
    SMOLLM2_135M, QWEN3_06B, QWEN3_17B, QWEN3_4B, LLAMA_3_8B, QWEN3_8B, QWEN3_14B, QWEN3_32B, QWEN3_30B_A3B,
    GPT_OSS_20B, LLAMA_3_70B, GPT_OSS_120B, QWEN3_235B_A22B, LLAMA_31_405B,
)  # fmt: skip

Q4_K_M_BYTES = {"Llama-3-8B": 4.92e9, "Llama-3-70B": 42.52e9}
"""Bytes of the GGUF files of the usual 4-bit mix; larger than 4 bits a weight, as some matrices have 6."""
