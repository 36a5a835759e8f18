"""Roles to text by templates that behave like those of many model families."""

from __future__ import annotations

from typing import Any

import pytest

from branchwise.interpreter.chat import ChatTemplate, Loose, Turn, compose
from branchwise.interpreter.errors import ChatError

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<s>system\nBe kind</s>\n{% endif %}" + CHATML
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<turn>' + m['role'] + '\n' + m['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
FORGETS_THINKING = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' }}"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<bos>", eos_token="<end>")


def user(content: str) -> Turn:
    return Turn("user", content, open=False)


def assistant(content: str, *, open: bool = False) -> Turn:
    return Turn("assistant", content, open=open)


def test_an_open_assistant_turn_follows_the_generation_prompt() -> None:
    text = compose([user("hi"), assistant("Sure, ", open=True)], template(CHATML))
    assert text == "<s>user\nhi</s>\n<s>assistant\nSure, "


@pytest.mark.parametrize("prefill", ["", "assistant", "user", "\n", "<", "the"])
def test_a_prefill_stands_after_the_generation_prompt_whatever_it_says(prefill: str) -> None:
    text = compose([user("the user"), assistant(prefill, open=True)], template(CHATML))
    assert text == "<s>user\nthe user</s>\n<s>assistant\n" + prefill


def test_an_open_turn_of_another_role_is_cut_where_it_ends() -> None:
    text = compose([user("hi"), assistant("yes"), Turn("user", "and the", open=True)], template(CHATML))
    assert text == "<s>user\nhi</s>\n<s>assistant\nyes</s>\n<s>user\nand the"


def test_a_default_system_turn_appears_only_without_one() -> None:
    assert compose([user("hi")], template(DEFAULT_SYSTEM)).startswith("<s>system\nBe kind</s>")
    assert "kind" not in compose([Turn("system", "Rhyme", open=False), user("hi")], template(DEFAULT_SYSTEM))


def test_what_a_template_refuses_is_said_with_its_own_words_and_the_roles() -> None:
    with pytest.raises(ChatError) as caught:
        compose([Turn("system", "a", open=False), user("b")], template(ALTERNATING))
    assert str(caught.value) == "the model's chat template refuses the roles system, user: System role not supported"
    with pytest.raises(ChatError, match="refuses the roles user, user: Conversation roles must alternate"):
        compose([user("a"), user("b")], template(ALTERNATING))


def test_loose_text_stands_where_it_was_put() -> None:
    text = compose(
        [Loose("Before. "), user("hi"), Loose("Between. "), assistant("yes"), Loose("After.")], template(CHATML)
    )
    assert text == "Before. <s>user\nhi</s>\nBetween. <s>assistant\nyes</s>\nAfter."


def test_a_template_that_rewrites_its_history_is_followed() -> None:
    first = [user("q"), assistant("<think>hm</think>yes", open=True)]
    assert compose(first, template(FORGETS_THINKING)) == "[user]q[assistant]<think>hm</think>yes"
    second = [user("q"), assistant("<think>hm</think>yes"), user("why"), assistant("", open=True)]
    assert compose(second, template(FORGETS_THINKING)) == "[user]q[assistant]yes[user]why[assistant]"


def test_a_rewritten_history_with_loose_text_in_it_is_refused() -> None:
    changing = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ChatError, match="writes earlier turns anew when role 'user' begins, but there is text outside"):
        compose([user("a"), Loose("loose"), user("b")], template(changing))


def test_a_model_without_a_template_gets_a_plain_one() -> None:
    assert compose([user("hi"), assistant("", open=True)], template(None)) == "User:\nhi\n\nAssistant:\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in %}", "the model's chat template cannot be read: line 1: Expected an expression"),
        ("{{ 1 / 0 }}", "the model's chat template fails: ZeroDivisionError: division by zero."),
    ],
)
def test_a_broken_template_is_named_as_such(source: str, message: str) -> None:
    with pytest.raises(ChatError) as caught:
        compose([user("a")], template(source))
    assert str(caught.value).startswith(message)


def test_a_model_without_a_template_is_named_once_and_when_it_matters(caplog: pytest.LogCaptureFixture) -> None:
    plain = template(None)
    assert compose([Loose("no roles")], plain) == "no roles"
    assert not caplog.records
    for _ in range(2):
        compose([user("hi")], plain)
    assert [record.getMessage() for record in caplog.records] == [
        "the model has no chat template; each turn is written as a line `Role:` and its text"
    ]


def test_text_that_a_template_leaves_out_is_refused() -> None:
    only = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }};{% endfor %}"
    assert compose([user("a"), assistant("b"), user("c")], template(only)) == "a;b;c;"
    with pytest.raises(ChatError, match=r"^the model's chat template leaves out the text of role 'system'\. Use"):
        compose([Turn("system", "Rhyme", open=False), user("a")], template(only))


def test_text_that_a_template_writes_in_another_form_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shouting = "{% for m in messages %}{{ m.content | upper }};{% endfor %}"
    shouts = template(shouting)
    renders = 0

    def render(*args: Any) -> str:
        nonlocal renders
        renders += 1
        return ChatTemplate._render(shouts, *args)

    monkeypatch.setattr(shouts, "_render", render)
    assert compose([user("a"), user("b")], shouts) == "A;B;"
    renders = 0
    assert compose([user("a"), user("b")], shouts) == "A;B;"
    assert renders == 1, "it is known by now that the template keeps what users say"


def test_a_refusal_names_the_last_roles_of_a_long_conversation() -> None:
    with pytest.raises(ChatError, match=r"refuses the roles \.\.\., assistant, user, assistant, system: System role"):
        compose([*[user("a"), assistant("b")] * 50, Turn("system", "c", open=False)], template(ALTERNATING))
