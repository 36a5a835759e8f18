"""`OpenAI`: a server across the network as a backend of programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from branchwise.lang import GenOptions, OptionError, Trace
from branchwise.lang.checks import real_number, shown, whole_number
from branchwise.lang.options import checked_defaults

from .asking import Prompt
from .checking import check
from .client import Client, Stats
from .dialect import Dialect, Prefill, dialect_of
from .loop import LoopThread
from .session import RemoteSession


class OpenAI:
    """A model behind an endpoint like OpenAI's, ready to run programs.

    A program with roles is sent as a chat, one without as a completion. What the server cannot be asked raises
    `Unsupported` before its request; what it refuses or fails at raises where the result is read, with its own message.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        server: str | Dialect = "openai",
        prefill: Prefill | None = None,
        scores_choices: bool | None = None,
        speculative_tokens: int = 0,
        concurrency: int = 64,
        max_retries: int = 4,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        """Remember what to ask; nothing is sent.

        Args:
            model: its name on the server.
            base_url: up to and with `/v1`; without it the client's own, `$OPENAI_BASE_URL` or OpenAI's.
            api_key: without it `$OPENAI_API_KEY`; a server given by `base_url` may need none.
            server: the kind, which says what it takes beyond OpenAI's protocol: "openai", "branchwise", "sglang",
                "vllm", or a `Dialect`.
            prefill: how text inside the assistant's turn is continued, if not as the kind of server says.
            scores_choices: whether completions score their prompt (`echo` with `logprobs`), if not as the kind says.
                Else `select` is held to the choices, and its result says so.
            speculative_tokens: ask for so many tokens where a completion's `gen` has a stop, and answer the calls after
                it from what is over, while the program says what the model wrote. 0 turns it off.
            concurrency: at most so many requests at once.
            max_retries: how often a request is sent again after 408, 409, 429, 5xx or a lost connection, if none of its
                text was told. The wait doubles from half a second, or is what `Retry-After` says, up to a minute.
            timeout_s: the longest silence of the server, in seconds.
            headers: more headers.
            extra_body: more fields of every request, as they are.
            defaults: options of `gen` that hold where neither call, run nor function says otherwise.

        Raises:
            OptionError: an argument has a value it cannot have.
        """
        if not isinstance(model, str) or not model:
            raise OptionError(f"OpenAI(model): must be the model's name on the server, got {shown(model)}.")
        if prefill not in (None, "continue_final_message", "prefix"):
            raise OptionError(
                f'OpenAI(prefill): must be "continue_final_message", "prefix" or None, got {shown(prefill)}.'
            )
        if real_number(timeout_s, "OpenAI(timeout_s)") <= 0:
            raise OptionError(f"OpenAI(timeout_s) must be above 0, got {timeout_s}.")
        self.model = model
        dialect = dialect_of(server, "OpenAI(server)")
        self.dialect = dialect if prefill is None else replace(dialect, prefill=prefill)
        self.scores_choices = self.dialect.echo if scores_choices is None else scores_choices
        self.speculative_tokens = whole_number(speculative_tokens, "OpenAI(speculative_tokens)", least=0)
        self.stats = Stats()
        self._defaults = checked_defaults("OpenAI(defaults=...)", {} if defaults is None else defaults)
        self.client = Client(
            model,
            base_url=base_url,
            api_key=api_key,
            headers=headers,
            timeout_s=timeout_s,
            concurrency=whole_number(concurrency, "OpenAI(concurrency)", least=1),
            max_retries=whole_number(max_retries, "OpenAI(max_retries)", least=0),
            extra_body=extra_body,
            stats=self.stats,
        )
        self.loop = LoopThread(self.client.close)

    @property
    def defaults(self) -> GenOptions:
        """What holds for a generation where neither its call nor the run nor the function says anything."""
        return self._defaults

    def open_session(self) -> RemoteSession:
        """A new, empty conversation."""
        return RemoteSession(self, Prompt())

    def check_trace(self, trace: Trace) -> None:
        """Refuse a program with a call that the server cannot be asked. No request is made.

        Raises:
            Unsupported: with the call and the line.
        """
        check(trace, self.open_session())

    def close(self) -> None:
        """Cancel what runs, and close the connections."""
        self.loop.close()

    def __enter__(self) -> OpenAI:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenAI({self.model!r}, base_url={self.client.base_url!r}, server={self.dialect.name!r})"
