"""A program by its file and name, and its arguments from the command line."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from branchwise.lang import Program

from .errors import WrongArgument

Arguments: TypeAlias = Mapping[str, Any]


def load_program(spec: str) -> Program[Any]:
    """The program that `file.py:name` names; without a name the only one that the file defines.

    Raises:
        WrongArgument: there is no such file or program.
        Whatever the file raises when it is run.
    """
    path, name = _split(spec)
    if not path.is_file():
        raise WrongArgument(f"there is no file {path}. Write FILE:PROGRAM, for instance tips.py:advice.")
    module = _loaded(path)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Program)}
    own = {key: value for key, value in found.items() if value.__module__ == module.__name__}
    known = f"It has: {', '.join(sorted(own or found))}." if found else "It has no @function."
    if name is not None and name in found:
        return found[name]
    if name is None:
        if len(own) == 1:
            return next(iter(own.values()))
        raise WrongArgument(f"which program of {path}? {known} Write {path}:NAME.")
    raise WrongArgument(f"{path} has no program {name!r}. {known}{_meant(name, found)}")


def read_arguments(program: Program[Any], given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE`s as arguments: text where the parameter is a `str`, else JSON where it can be read as that.

    Raises:
        WrongArgument: the program takes no such argument, or lacks one.
    """
    parameters = dict(list(inspect.signature(program).parameters.items())[1:])  # without the state
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise WrongArgument(f"--arg {item}: write --arg NAME=VALUE.")
        if name not in parameters and not open_ended:
            takes = f"It takes: {', '.join(parameters) or 'none'}."
            raise WrongArgument(f"{program.name} has no argument {name!r}. {takes}{_meant(name, parameters)}")
        parameter = parameters.get(name)
        is_text = parameter is not None and parameter.annotation in (str, "str")
        arguments[name] = value if is_text else _read(value)
    lacking = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in arguments
    ]
    if lacking:
        raise WrongArgument(
            f"{program.name} lacks {'an argument' if len(lacking) == 1 else 'arguments'}. "
            f"Add {' '.join(f'--arg {name}=VALUE' for name in lacking)}"
        )
    return arguments


def _split(spec: str) -> tuple[Path, str | None]:
    path, colon, name = spec.rpartition(":")
    return (Path(path), name) if colon and name.isidentifier() else (Path(spec), None)


def _loaded(path: Path) -> ModuleType:
    """The file as a module, which finds what lies beside it, as it would if Python ran it."""
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"program_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WrongArgument(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickles look for their classes
    spec.loader.exec_module(module)
    return module


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def _meant(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]}?" if close else ""
