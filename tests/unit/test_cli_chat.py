"""The chat: history, commands, Ctrl-C between steps, and words that are not torn apart."""

import io
import os
import signal

import pytest
from rich.console import Console

from minivllm.cli.answer import Answer
from minivllm.cli.chat import Chat, WordWrap, ctrl_c_as_flag, no_echo
from minivllm.config import EngineConfig
from minivllm.llm import LLM
from minivllm.request import SamplingParams
from tests.cli_support import write_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(model, EngineConfig(num_kv_blocks=40, dtype="float32", max_model_len=256))


@pytest.fixture
def chat(llm: LLM) -> Chat:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    return Chat(llm, SamplingParams(temperature=0, max_tokens=8), console, "")


def shown(chat: Chat) -> str:
    return chat.console.file.getvalue()


def test_an_answer_is_shown_with_its_cost_and_joins_the_history(chat: Chat):
    chat.reply("hello")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert "TTFT" in shown(chat)


def test_the_second_answer_starts_from_the_blocks_of_the_first(chat: Chat):
    chat.reply("a question that fills a block or two")
    chat.reply("and another")
    assert chat.answer is not None
    assert chat.answer.request.num_cached_tokens >= 16


def test_reset_forgets_the_conversation_but_not_the_system_message(chat: Chat):
    chat.reply("hello")
    chat.reset()
    assert [m["role"] for m in chat.messages] == ["system"]


def test_a_message_that_never_fits_is_refused_and_leaves_no_trace(chat: Chat):
    chat.reply("x" * 300)
    assert "300" in shown(chat) or "tokens" in shown(chat)
    assert [m["role"] for m in chat.messages] == ["system"]
    chat.reply("short")
    assert len(chat.messages) == 3


def test_a_long_conversation_forgets_its_oldest_exchange(chat: Chat):
    for question in ("first " * 10, "second " * 10, "third " * 10):
        chat.reply(question)
    assert "oldest" in shown(chat)
    assert not any(m["content"].startswith("first") for m in chat.messages)
    assert chat.messages[-2]["content"].startswith("third")


def test_stats_show_the_cache_and_the_last_block_table(chat: Chat):
    chat.reply("a question that fills a block or two")
    chat.show_stats()
    text = shown(chat)
    for part in ("scheduler", "KV blocks", "prefix cache", "block table", "slots"):
        assert part in text
    assert chat.answer is not None
    assert f"{chat.answer.request.id} " in text


def test_trace_draws_the_steps_of_the_conversation(chat: Chat):
    chat.reply("hello")
    chat.show_trace()
    assert "last token" in shown(chat)


def test_a_stopped_answer_frees_its_blocks_and_the_engine_goes_on(chat: Chat, llm: LLM):
    steps = iter([False, False, True])
    answer = Answer(llm, "hello", SamplingParams(max_tokens=50, ignore_eos=True), lambda: next(steps))
    assert len(list(answer)) == 2
    pool = llm.engine.core.scheduler.kv.pool
    assert pool.num_free == pool.num_usable
    chat.reply("hello")
    assert chat.messages[-1]["role"] == "assistant"


def test_the_first_ctrl_c_is_a_flag_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_as_flag() as pressed:
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_terminal_there_is_no_echo_to_switch_off(monkeypatch: pytest.MonkeyPatch):
    read, write = os.pipe()
    os.close(write)
    with open(read) as pipe:
        monkeypatch.setattr("sys.stdin", pipe)
        with no_echo():
            assert pipe.read() == ""


def wrapped(text: str, width: int) -> str:
    wrap = WordWrap(width)
    return "".join(map(wrap.feed, text)) + wrap.finish()


def test_words_move_to_the_next_line_whole():
    assert wrapped("the quick brown fox", 10) == "the quick \nbrown fox"


def test_no_character_is_lost_or_added_but_line_breaks():
    text = "a  bb\n\nccc dddddddddddddddd e\tf "
    assert wrapped(text, 8).replace("\n", "") == text.replace("\n", "")


def test_a_line_of_code_keeps_its_indent():
    assert wrapped("def f():\n    return 1", 40) == "def f():\n    return 1"
