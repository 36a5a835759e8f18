"""Python types as JSON Schema, and the way back from JSON to a value of the type.

What is known here: int, float, str, bool, None, Any, Enum, Literal, Annotated, NewType, list, tuple, set, dict, unions,
dataclasses, TypedDicts, date, time, datetime and UUID, inside each other and inside themselves. Pydantic models, and
types with Pydantic's constraints on them, describe and read themselves; Pydantic is not needed for the others. Objects
of a type have the members that it names and no others, unless it says so itself.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import importlib
import json
import types
import typing
import uuid
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .errors import OptionError

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)|{_LEAP}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
READABLE = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""What of a format Python's types can hold: not the year 0, nor the second 60, nor 29 February of any year."""

Read: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Schema:
    """JSON Schema as JSON, and how a text that fulfils it becomes a value; `read` raises where it cannot."""

    text: str
    read: Callable[[str], Any] = field(default=json.loads, compare=False, repr=False)


def schema_of(value: object, where: str) -> Schema:
    """The schema that `value` is: a dict, True or False, JSON text, a type, or a `pydantic.TypeAdapter`.

    Raises:
        OptionError: it is none of these, or holds a type that is not known here.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise OptionError(f"{where} is text that is not JSON: {error}.") from None
        if not isinstance(value, dict | bool):
            raise OptionError(f"{where} must be a JSON object, true or false, got {value!r} ({type(value).__name__}).")
    if isinstance(value, dict | bool):
        return Schema(_written(value, where))
    if hasattr(value, "json_schema") and hasattr(value, "validate_json"):
        return Schema(_written(_narrowed(value.json_schema()), where), value.validate_json)
    types_ = _Types(where)
    schema, read = types_.of(value)
    if types_.defs:
        schema = {**schema, "$defs": types_.defs}
    return Schema(_written(schema, where), lambda text: read(json.loads(text)))


def checked_type(value: object, where: str) -> object:
    """`value`, if it is a type and no schema that was written out."""
    if isinstance(value, str | dict | bool):
        raise OptionError(f"{where} must be a type, got {value!r} ({type(value).__name__}). Write json_schema= for it.")
    return value


def _written(schema: object, where: str) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{where} cannot be written as JSON: {error}.") from error
    return text


def _narrowed(schema: Any) -> Any:
    """The schema of a type, narrower where it does not say otherwise: objects have no members but those that are named,
    and dates are those that Python can hold."""
    if isinstance(schema, list):
        return [_narrowed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in ("const", "enum", "default") else _narrowed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    if schema.get("type") == "string" and schema.get("format") in READABLE:
        closed.setdefault("pattern", READABLE[schema["format"]])
    return closed


class _Types:
    """Turns types into schemas; those that may hold themselves become definitions, made once."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.defs: dict[str, Any] = {}
        self._made: dict[Any, tuple[dict[str, Any], Read]] = {}

    def of(self, kind: Any) -> tuple[dict[str, Any], Read]:
        if kind in (None, type(None)):
            return {"type": "null"}, _reader(type(None))
        if kind is Any or kind is object:
            return {}, lambda found: found
        if isinstance(kind, str | typing.ForwardRef):
            raise OptionError(f"{self.where}: the name {kind!r} stands for no type here. Give the type itself.")
        if _is_pydantic(kind):
            return self._pydantic(kind)
        if isinstance(kind, typing.NewType):
            return self.of(kind.__supertype__)
        if typing.get_origin(kind) is not None or isinstance(kind, types.UnionType):
            return self._generic(kind, typing.get_origin(kind), typing.get_args(kind))
        if kind in _PLAIN:
            return dict(_PLAIN[kind][0]), _PLAIN[kind][1]
        if kind in (list, tuple, set, frozenset, dict):
            return self._generic(kind, kind, ())
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return {"enum": [member.value for member in kind]}, kind
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return self._object(kind, _dataclass_members(kind), lambda found: kind(**found))
        if typing.is_typeddict(kind):
            return self._object(kind, _dict_members(kind), lambda found: found)
        raise OptionError(
            f"{self.where}: {kind!r} is no type that JSON has here. Known: {', '.join(k.__name__ for k in _PLAIN)}, "
            "Enum, Literal, list, tuple, set, dict, unions, dataclasses, TypedDicts and Pydantic models."
        )

    def _generic(self, kind: Any, origin: Any, args: tuple[Any, ...]) -> tuple[dict[str, Any], Read]:
        if origin in (typing.Union, types.UnionType):
            return self._union(args)
        if origin is typing.Annotated:
            return self._annotated(args)
        if origin in (typing.Required, typing.NotRequired):
            return self.of(args[0])
        if origin is typing.Literal:
            return {"enum": list(args)}, _literal(args)
        if origin is tuple and args and args[-1] is not Ellipsis:
            return self._tuple(args)
        if origin in (dict, abc.Mapping, abc.MutableMapping):
            if args and args[0] is not str:
                raise OptionError(f"{self.where}: the keys of {kind!r} must be str, as JSON has no others.")
            schema, read = self.of(args[1]) if args else self.of(Any)
            return {"type": "object", "additionalProperties": schema or True}, _mapping(read)
        if origin in _COLLECTIONS:
            schema, read = self.of(args[0]) if args else self.of(Any)
            return {"type": "array", "items": schema}, _array(read, _COLLECTIONS[origin])
        if isinstance(origin, type) and (dataclasses.is_dataclass(origin) or typing.is_typeddict(origin)):
            raise OptionError(f"{self.where}: {kind!r} has type parameters. Give a class without, or a Pydantic model.")
        raise OptionError(f"{self.where}: {kind!r} is no type that JSON has here.")

    def _annotated(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], Read]:
        schema, read = self.of(args[0])
        said = next((extra for extra in args[1:] if isinstance(extra, str)), None)
        return ({**schema, "description": said} if said and "$ref" not in schema else schema), read

    def _union(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], Read]:
        made = [self.of(arg) for arg in args]
        readers = [read for _, read in made]

        def read(found: Any) -> Any:
            problems = []
            for one in readers:
                try:
                    return one(found)
                except (TypeError, ValueError) as error:
                    problems.append(str(error))
            raise ValueError(f"{found!r} is none of the types of the union: {'; '.join(problems)}")

        return {"anyOf": [schema for schema, _ in made]}, read

    def _tuple(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], Read]:
        made = [self.of(arg) for arg in args]

        def read(found: Any) -> Any:
            if not isinstance(found, list) or len(found) != len(made):
                raise ValueError(f"{found!r} is not a list of {len(made)}")
            return tuple(one(item) for (_, one), item in zip(made, found, strict=True))

        sizes = {"minItems": len(made), "maxItems": len(made)}
        return {"type": "array", "prefixItems": [schema for schema, _ in made], "items": False, **sizes}, read

    def _object(
        self, kind: type, members: dict[str, tuple[Any, bool]], make: Callable[[dict[str, Any]], Any]
    ) -> tuple[dict[str, Any], Read]:
        """An object of `members`: each a type, and whether it must be there."""
        if kind in self._made:
            return self._made[kind]
        name = self._define(kind.__name__)
        readers: dict[str, Read] = {}

        def read(found: Any) -> Any:
            if not isinstance(found, dict):
                raise ValueError(f"{found!r} is not an object")
            return make({key: readers[key](value) for key, value in found.items()})

        self._made[kind] = {"$ref": f"#/$defs/{name}"}, read
        properties = {}
        for member, (inner, _) in members.items():
            properties[member], readers[member] = self.of(inner)
        required = [member for member, (_, needed) in members.items() if needed]
        self.defs[name] = {
            "type": "object", "properties": properties, "required": required, "additionalProperties": False,
        }  # fmt: skip
        return self._made[kind]

    def _define(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.defs:
            count += 1
            name = f"{wanted}_{count}"
        self.defs[name] = {}
        return name

    def _pydantic(self, kind: Any) -> tuple[dict[str, Any], Read]:
        adapter = importlib.import_module("pydantic").TypeAdapter(kind)
        schema = _narrowed(adapter.json_schema())
        names = {inner: self._define(inner) for inner in schema.get("$defs", {})}
        for inner, name in names.items():
            self.defs[name] = _renamed(schema["$defs"][inner], names)
        rest = _renamed({key: value for key, value in schema.items() if key != "$defs"}, names)
        return rest, lambda found: adapter.validate_json(json.dumps(found))


def _is_pydantic(kind: Any) -> bool:
    if hasattr(kind, "__pydantic_validator__"):
        return True
    extras = getattr(kind, "__metadata__", ())
    return any(type(extra).__module__.split(".")[0] in ("pydantic", "annotated_types") for extra in extras)


def _renamed(node: Any, names: dict[str, str]) -> Any:
    if isinstance(node, list):
        return [_renamed(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    prefix = "#/$defs/"
    return {
        key: prefix + names[value.removeprefix(prefix)]
        if key == "$ref" and isinstance(value, str) and value.removeprefix(prefix) in names
        else _renamed(value, names)
        for key, value in node.items()
    }


def _dataclass_members(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return {
        each.name: (hints[each.name], each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(kind)
        if each.init
    }


def _dict_members(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: (inner, name in kind.__required_keys__) for name, inner in hints.items()}


def _reader(*kinds: type) -> Read:
    """Takes a value of one of these types as it is; a bool is no number."""

    def read(found: Any) -> Any:
        if type(found) not in kinds:
            raise ValueError(f"{found!r} is not {' or '.join(kind.__name__ for kind in kinds)}")
        return found

    return read


def _spelled(parse: Callable[[str], Any]) -> Read:
    def read(found: Any) -> Any:
        if not isinstance(found, str):
            raise ValueError(f"{found!r} is not a string")
        return parse(found)

    return read


def _literal(allowed: tuple[Any, ...]) -> Read:
    def read(found: Any) -> Any:
        for value in allowed:
            if type(value) is type(found) and value == found:
                return value
        raise ValueError(f"{found!r} is not one of {allowed}")

    return read


def _array(read: Read, make: Callable[[list[Any]], Any]) -> Read:
    def read_all(found: Any) -> Any:
        if not isinstance(found, list):
            raise ValueError(f"{found!r} is not a list")
        return make([read(item) for item in found])

    return read_all


def _mapping(read: Read) -> Read:
    def read_all(found: Any) -> Any:
        if not isinstance(found, dict):
            raise ValueError(f"{found!r} is not an object")
        return {key: read(value) for key, value in found.items()}

    return read_all


def _float(found: Any) -> float:
    return float(_reader(int, float)(found))


def _format(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = _narrowed({"type": "string", "format": name})
    return schema


_PLAIN: dict[Any, tuple[dict[str, Any], Read]] = {
    int: ({"type": "integer"}, _reader(int)),
    float: ({"type": "number"}, _float),
    str: ({"type": "string"}, _reader(str)),
    bool: ({"type": "boolean"}, _reader(bool)),
    datetime.datetime: (_format("date-time"), _spelled(datetime.datetime.fromisoformat)),
    datetime.date: (_format("date"), _spelled(datetime.date.fromisoformat)),
    datetime.time: (_format("time"), _spelled(datetime.time.fromisoformat)),
    uuid.UUID: (_format("uuid"), _spelled(uuid.UUID)),
}

_COLLECTIONS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    abc.Sequence: list,
    abc.Iterable: list,
    tuple: tuple,
    set: set,
    abc.Set: set,
    frozenset: frozenset,
}
