"""`plan`: whether a model would start on a GPU, and what its memory goes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from minivllm.calc.hw import gib
from minivllm.cli.flags import parse_length, parse_size
from minivllm.config import MinivllmError

if TYPE_CHECKING:
    from minivllm.calc.budget import Budget

WOULD_NOT_START = 1


def plan(
    model: Annotated[str, typer.Option("--model", "-m", help="A model of minivllm.calc.models, such as llama-3-70b.")],
    gpu: Annotated[str, typer.Option(help="A device of minivllm.calc.hw, such as h100.")],
    tp: Annotated[int, typer.Option(help="GPUs that share the model: tensor parallelism.")] = 1,
    max_model_len: Annotated[
        str, typer.Option(metavar="N|auto", help="Longest request, in tokens; auto: the model's, or what fits.")
    ] = "auto",
    memory_utilization: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each GPU that the engine may take.")
    ] = 0.92,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.")] = 16,
    weight_bits: Annotated[int, typer.Option(help="Bits of a weight: 16, 8 with FP8, 4.")] = 16,
    kv_bits: Annotated[int, typer.Option(help="Bits of an element of KV: 16, or 8 with FP8.")] = 16,
    activations: Annotated[str, typer.Option(metavar="SIZE", help="What a step takes at its peak.")] = "1.5GiB",
    cuda_graphs: Annotated[str, typer.Option(metavar="SIZE", help="What CUDA graphs take.")] = "0.6GiB",
    other: Annotated[str, typer.Option(metavar="SIZE", help="CUDA context, communication buffers.")] = "0.9GiB",
) -> None:
    """Say line by line what a GPU's memory goes to, and whether an engine would start. No model is loaded.

    Activations, graphs and other are those of an H100 with steps of 8,192 tokens; measure yours. A layer with a sliding window
    is counted with its window and one such step; the table also tells what the request would take without windows. The
    exit code is 1 where the engine would refuse to start.
    """
    from minivllm.calc.budget import Budget, find_device, find_shape

    try:
        budget = Budget(
            find_shape(model),
            find_device(gpu),
            parse_length(max_model_len),
            tp=tp,
            memory_utilization=memory_utilization,
            block_size=block_size,
            weight_bits=weight_bits,
            kv_bits=kv_bits,
            activation_bytes=parse_size("activations", activations),
            graph_bytes=parse_size("cuda_graphs", cuda_graphs),
            other_bytes=parse_size("other", other),
        )
    except ValueError as error:
        raise MinivllmError(str(error)) from error
    show(budget)
    if not budget.fits:
        raise typer.Exit(WOULD_NOT_START)


def show(budget: Budget) -> None:
    """Print the budget as a table, then the verdict."""
    from rich.console import Console
    from rich.table import Table

    gpus = f"{budget.tp} x {budget.device.name}" if budget.tp > 1 else budget.device.name
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title_justify="left", title_style="bold")
    table.title = f"{budget.shape.name} on {gpus}" + (", each GPU:" if budget.tp > 1 else ":")
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(style="dim", overflow="fold")
    for line in budget_lines(budget):
        table.add_row(*line)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\n[{'green' if budget.fits else 'red'}]{verdict(budget)}[/]")


def budget_lines(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """What, how much, and why: a line of the table each."""
    known = budget.device.usable_bytes is not None
    label = f"{budget.device.memory_bytes / 1e9:.0f} GB on the label"
    yield "memory", gib(budget.total_bytes), label if known else f"by its label; {label}, less may be usable"
    yield "may be taken", gib(budget.requested_bytes), f"{budget.memory_utilization:.0%} of it"
    parts = f", one of {budget.tp} parts" if budget.tp > 1 else ""
    parameters = f"{budget.shape.parameters / 1e9:.2f} billion of {budget.weight_bits} bits{parts}"
    yield "- weights", gib(budget.weight_bytes), parameters
    yield "- activations", gib(budget.activation_bytes), "peak of a step"
    yield "- CUDA graphs", gib(budget.graph_bytes), ""
    yield "- other", gib(budget.other_bytes), "CUDA context, communication buffers"
    yield "= left for KV", gib(budget.kv_budget), ""
    yield "", "", ""
    yield from kv_lines(budget)
    yield "at once", f"{budget.concurrency:.2f}", "requests of that length"
    made_for = f"the model was made for {budget.shape.max_position:,}"
    yield "longest", f"{budget.longest:,}", f"tokens that memory lets one request have; {made_for}"


def kv_lines(budget: Budget) -> Iterator[tuple[str, str, str]]:
    """The lines of `budget_lines` on tokens, blocks and one request; with windows, what they spare it."""
    from minivllm.calc.memory import layers_per_block

    windows, size = budget.shape.windows, budget.block_size
    layers, together, sliding = len(windows), layers_per_block(windows), sorted({w for w in windows if w})
    token_bytes = budget.block_bytes * layers // together // size
    yield "KV of a token", f"{token_bytes / 2**10:g} KiB", "keys and values, all layers"
    where = f" in {together} layers" if sliding else f": {budget.num_blocks * size:,}"
    yield "KV blocks", f"{budget.num_blocks:,}", f"of {size} tokens{where}; one is the null block"
    tokens = f"{budget.length:,} tokens"
    if sliding:
        kept = f"{' or '.join(map(str, sliding))} and a step of {budget.max_num_batched_tokens:,}"
        few = layers - windows.count(None)
        yield "one request", gib(budget.needed_bytes), f"{tokens}; {few} of {layers} layers keep {kept}"
        yield "- all kept", gib(budget.one_table_bytes), 'if they kept everything: hybrid="off"'
    else:
        yield "one request", gib(budget.needed_bytes), tokens


def verdict(budget: Budget) -> str:
    """Whether an engine would start; and if not, why and what helps."""
    if budget.fits:
        return f"Starts, with max_model_len={budget.length:,}."
    if budget.longest == 0:
        return "Does not start: nothing is left for KV. Take more GPUs, fewer bits a weight, or a smaller model."
    if budget.length > (most := budget.shape.max_position):
        return (
            f"Does not start: max_model_len={budget.length:,}, but the model was made for at most {most:,} positions."
        )
    short = gib(budget.needed_bytes - (budget.num_blocks - 1) * budget.block_bytes)
    return (
        f"Does not start: one request of max_model_len={budget.length:,} needs {short} more than there is. Set it to at "
        f"most {budget.longest:,}, or take more GPUs or fewer bits a weight."
    )
