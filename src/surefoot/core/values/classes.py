"""Enum members, named tuples and dataclasses: kept by the name of their class.

A class is found by name among the modules that are imported already, through plain dictionaries: nothing is
imported, no module's or class's attribute hook runs, and instances are made without calling the class, field by
field, since the recorded fields are already what `__init__` and `__post_init__` once made.

A class that is gone or changed at restore is `UnsupportedStateError`, not `CorruptError`: the checkpoint is sound and
the program has to be put right, so the copy must not be taken for a bad one.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.core.values.forms import At, refusal
from surefoot.errors import UnsupportedStateError


class _Changed(Exception):  # noqa: N818 - how a class differs from the one that was saved
    pass


def take_apart(value: object, at: At) -> tuple[str, Any] | None:
    """The tag and the parts (an enum's member name, else fields by name) of a value kept by its class's name.

    None if it is of no such class. Raises `UnsupportedStateError` if it is, but not in a way that can be kept.
    """
    cls = type(value)
    tag: str
    parts: Any
    if isinstance(value, enum.Enum):
        tag, parts = "enum", _member_name(value, at)
    elif _is_named_tuple(cls):
        tag, parts = "namedtuple", _tuple_fields(value, at)
    elif "__dataclass_fields__" in cls.__dict__:
        tag, parts = "dataclass", _dataclass_fields(value, at)
    else:
        return None
    if find_class(cls.__module__, cls.__qualname__) is not cls:
        raise refusal(at, value, "its class cannot be found by name: define it at the top of a module")
    return tag, parts


def put_together(tag: str, module: object, qualname: object, parts: Any, at: At) -> object:
    """The value that `take_apart` described.

    Raises `UnsupportedStateError` if the class is not there (any more) or has other fields; anything on nonsense.
    """
    if type(module) is not str or type(qualname) is not str:
        raise TypeError("a class is named by two strings")
    cls = find_class(module, qualname)
    try:
        if cls is None:
            raise _Changed(f"is not imported: import {module} before the restore")
        return BUILDERS[tag](cls, parts)
    except _Changed as changed:
        raise UnsupportedStateError(f"{at}: class {f'{module}.{qualname}'!a} {changed}") from None


def find_class(module_name: str, qualname: str) -> type | None:
    """The class of that name among the imported modules, or None. Runs no code but its own."""
    found: object = sys.modules.get(module_name)
    if not isinstance(found, types.ModuleType):
        return None
    # Not getattr: a module's __getattr__ or a lazily loaded module would import what the document names.
    names: Mapping[str, object] = object.__getattribute__(found, "__dict__")
    for part in qualname.split("."):
        found = names.get(part)
        if not isinstance(found, type):
            return None
        names = type.__dict__["__dict__"].__get__(found)
    return found if isinstance(found, type) else None


def _member_name(value: enum.Enum, at: At) -> str:
    name = value._name_
    if type(name) is not str or type(value)._member_map_.get(name) is not value:
        raise refusal(at, value, "a combination of flags: keep its integer value")
    return name


def _build_enum(cls: Any, name: Any) -> object:
    if not isinstance(cls, enum.EnumMeta):
        raise _Changed("is not an enum here")
    if type(name) is not str:
        raise TypeError("a member is named by a string")
    if name not in cls._member_map_:
        raise _Changed(f"has no member {name!a} here")
    return cls._member_map_[name]


def _is_named_tuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None) if issubclass(cls, tuple) else None
    return type(fields) is tuple and all(type(name) is str for name in fields)


def _tuple_fields(value: Any, at: At) -> dict[str, object]:
    names = type(value)._fields
    if len(names) != len(value) or getattr(value, "__dict__", None):
        raise refusal(at, value, "it carries more or less than its named fields")
    return dict(zip(names, tuple.__iter__(value), strict=True))


def _build_named_tuple(cls: Any, parts: Any) -> object:
    if not _is_named_tuple(cls):
        raise _Changed("is not a named tuple here")
    if tuple(parts) != cls._fields:
        raise _Changed(f"has the fields {cls._fields} here, not {tuple(parts)!a}")
    return tuple.__new__(cls, parts.values())


def _dataclass_fields(value: Any, at: At) -> dict[str, object]:
    """What the instance itself holds; a field that it leaves to the class's default is left to it."""
    names = [field.name for field in dataclasses.fields(value)]
    if not _is_plainly_made(type(value)):
        raise refusal(at, value, "its class has a __new__ of its own")
    parts = dict(getattr(value, "__dict__", {}))
    for name, slot in _slots(type(value)).items():
        try:
            parts[name] = slot.__get__(value)
        except AttributeError:
            continue
    if beside := parts.keys() - set(names):
        raise refusal(at, value, f"it carries attributes beside its fields: {', '.join(sorted(beside))}")
    if unset := [name for name in names if name not in parts and not _has_default(type(value), name)]:
        raise refusal(at, value, f"fields that are not set: {', '.join(unset)}")
    return {name: parts[name] for name in names if name in parts}


def _build_dataclass(cls: Any, parts: Any) -> object:
    if "__dataclass_fields__" not in cls.__dict__:
        raise _Changed("is not a dataclass here")
    if not _is_plainly_made(cls):
        raise _Changed("has a __new__ of its own here")
    names = [field.name for field in dataclasses.fields(cls)]
    if set(parts) - set(names) or any(name not in parts and not _has_default(cls, name) for name in names):
        raise _Changed(f"has the fields {tuple(names)} here, not {tuple(parts)!a}")
    value = object.__new__(cls)
    slots = _slots(cls)
    for name, part in parts.items():
        # Past __setattr__ and properties, which are the class's own code.
        if name in slots:
            slots[name].__set__(value, part)
        else:
            value.__dict__[name] = part
    return value


def _is_plainly_made(cls: Any) -> bool:
    return cls.__new__ is object.__new__


def _slots(cls: type) -> dict[str, Any]:
    members = {name: member for base in cls.__mro__[::-1] for name, member in base.__dict__.items()}
    return {name: member for name, member in members.items() if isinstance(member, types.MemberDescriptorType)}


def _has_default(cls: type, name: str) -> bool:
    found = [base.__dict__[name] for base in cls.__mro__ if name in base.__dict__]
    return bool(found) and not hasattr(type(found[0]), "__get__")


BUILDERS: dict[str, Callable[[Any, Any], object]] = {
    "enum": _build_enum,
    "namedtuple": _build_named_tuple,
    "dataclass": _build_dataclass,
}
