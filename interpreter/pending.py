"""What has to be awaited: nothing else can be done with it, and none may be forgotten."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Never, TypeVar

from branchwise.lang import CallError, LangError

T = TypeVar("T")


class Forgotten:
    """What was asked for in one run of a program and not awaited yet."""

    def __init__(self) -> None:
        self._calls: dict[int, str] = {}
        self._numbers = count()

    def add(self, call: str) -> int:
        number = next(self._numbers)
        self._calls[number] = call
        return number

    def remove(self, number: int) -> None:
        self._calls.pop(number, None)

    def check(self) -> None:
        """Refuse to end, or to wait for everything, while something was not awaited."""
        if self._calls:
            call, self._calls = next(iter(self._calls.values())), {}  # said once
            raise CallError(f"{call} was not awaited, so it did nothing. Write await {call}.")


class Pending(Generic[T]):
    """`await` it, as often as you like. Whatever else is done with it says that an `await` is missing."""

    __hash__ = object.__hash__

    def __init__(self, call: str, wait: Callable[[], Coroutine[Any, Any, T]], forgotten: Forgotten) -> None:
        self._call = call
        self._wait = wait
        self._forgotten = forgotten
        self._number = forgotten.add(call)

    def __await__(self) -> Generator[Any, None, T]:
        self._forgotten.remove(self._number)
        return self._wait().__await__()

    def __repr__(self) -> str:
        return f"<{self._call}, not awaited>"

    @property
    def why_not_appended(self) -> str:
        """What an error says of who uses it as a value."""
        return f"{self._call} is used without await. Write (await {self._call})."

    def _refuse(self, *_: object) -> Never:
        raise LangError(self.why_not_appended)

    if not TYPE_CHECKING:  # a checker shall see that none of this is there
        __str__ = __format__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _refuse
        __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = __enter__ = __exit__ = _refuse
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __mod__ = _refuse

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(f"{self.why_not_appended}{name}")
