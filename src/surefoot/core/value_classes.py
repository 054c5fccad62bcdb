"""Enum members, named tuples and dataclasses: kept by the name of their class.

A class is found by name among the modules that are imported already, through plain dictionaries: nothing is
imported, no module's or class's attribute hook runs, and instances are made without calling the class:

* enum: the member is looked up by name. Combinations of flags are refused (making one runs the class's code).
* named tuple: ``tuple.__new__`` with the recorded fields.
* dataclass: ``object.__new__``, then each field is set past ``__setattr__``; neither ``__init__`` nor
  ``__post_init__`` runs, since the recorded fields are already what those once made. Refused unless simple: all bases
  dataclasses (or ABC, Generic), no ``__new__`` or ``__del__`` of its own, no property in a field's place,
  every field set, and no attribute beside the fields.

A class that is gone or changed at restore is `UnsupportedStateError`, not `CorruptError`: the checkpoint is sound and
the program has to be put right, so the copy must not be taken for a bad one.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from surefoot.core.value_forms import Place, refusal, type_name
from surefoot.errors import UnsupportedStateError

ENUM, NAMED_TUPLE, DATACLASS = "enum", "namedtuple", "dataclass"
CLASS_TAGS = frozenset({ENUM, NAMED_TUPLE, DATACLASS})


def take_apart(value: object, place: Place) -> tuple[str, Any] | None:
    """The tag and the parts (an enum's member name, else fields by name) of a value kept by its class's name.

    None if it is of no such class. Raises `UnsupportedStateError` if it is, but not in a way that can be kept.
    """
    cls = type(value)
    tag: str
    parts: Any
    if isinstance(value, enum.Enum):
        tag, parts = ENUM, _member_name(value, place)
    elif _is_named_tuple(cls):
        tag, parts = NAMED_TUPLE, _tuple_fields(value, place)
    elif "__dataclass_fields__" in cls.__dict__:
        tag, parts = DATACLASS, _dataclass_fields(value, place)
    else:
        return None
    if find_class(cls.__module__, cls.__qualname__) is not cls:
        raise refusal(place, value, "its class cannot be found by name: define it at the top of a module")
    return tag, parts


def put_together(tag: str, module: object, qualname: object, parts: Any, place: Place) -> object:
    """The value that `take_apart` described.

    Raises `UnsupportedStateError` if the class is not there (any more) or has other fields; anything on nonsense.
    """
    if type(module) is not str or type(qualname) is not str:
        raise TypeError("a class is named by two strings")
    cls = find_class(module, qualname)
    if cls is None:
        raise _changed(place, module, qualname, f"is not imported: import {module} before the restore")
    build = {ENUM: _build_enum, NAMED_TUPLE: _build_named_tuple, DATACLASS: _build_dataclass}[tag]
    problem, value = build(cls, parts)
    if problem:
        raise _changed(place, module, qualname, problem)
    return value


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


def _changed(place: Place, module: str, qualname: str, problem: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{place}: class {f'{module}.{qualname}'!a} {problem}")


def _member_name(value: enum.Enum, place: Place) -> str:
    name = value._name_
    if type(name) is not str or type(value)._member_map_.get(name) is not value:
        raise refusal(place, value, "a combination of flags: keep its integer value")
    return name


def _build_enum(cls: type, name: Any) -> tuple[str, object]:
    if not isinstance(cls, enum.EnumMeta):
        return "is not an enum here", None
    if type(name) is not str:
        raise TypeError("a member is named by a string")
    member = cls._member_map_.get(name)
    return ("", member) if member is not None else (f"has no member {name!a} here", None)


def _is_named_tuple(cls: type) -> bool:
    fields = getattr(cls, "_fields", None) if issubclass(cls, tuple) else None
    return type(fields) is tuple and all(type(name) is str for name in fields)


def _tuple_fields(value: Any, place: Place) -> dict[str, object]:
    names = type(value)._fields
    if len(names) != len(value):
        raise refusal(place, value, "it has more or fewer values than named fields")
    if getattr(value, "__dict__", None):
        raise refusal(place, value, "it carries attributes beside its fields")
    return dict(zip(names, tuple.__iter__(value), strict=True))


def _build_named_tuple(cls: Any, parts: Any) -> tuple[str, object]:
    if not _is_named_tuple(cls):
        return "is not a named tuple here", None
    if tuple(parts) != cls._fields:
        return f"has the fields {cls._fields} here, not {tuple(parts)!a}", None
    return "", tuple.__new__(cls, parts.values())


def _dataclass_fields(value: Any, place: Place) -> dict[str, object]:
    cls = type(value)
    if why := _not_simple(cls):
        raise refusal(place, value, why)
    names = [field.name for field in dataclasses.fields(value)]
    beside = set(getattr(value, "__dict__", ())) - set(names)
    if beside:
        raise refusal(place, value, f"it carries attributes beside its fields: {', '.join(sorted(beside))}")
    missing = object()
    parts = {name: _stored(value, name, missing) for name in names}
    unset = [name for name, part in parts.items() if part is missing]
    if unset:
        raise refusal(place, value, f"fields that are not set: {', '.join(unset)}")
    return parts


def _stored(value: object, name: str, missing: object) -> object:
    """The field's value: on the instance, in a slot, or the class's default (``field(init=False, default=…)``)."""
    own: Mapping[str, object] = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    attribute = _class_attribute(type(value), name, missing)
    if isinstance(attribute, types.MemberDescriptorType):
        return getattr(value, name, missing)
    return attribute


def _build_dataclass(cls: Any, parts: Any) -> tuple[str, object]:
    if "__dataclass_fields__" not in cls.__dict__:
        return "is not a dataclass here", None
    if why := _not_simple(cls):
        return f"cannot be rebuilt here: {why}", None
    names = tuple(field.name for field in dataclasses.fields(cls))
    if set(parts) != set(names):
        return f"has the fields {names} here, not {tuple(parts)!a}", None
    value = object.__new__(cls)
    for name, part in parts.items():
        object.__setattr__(value, name, part)
    return "", value


def _not_simple(cls: type) -> str:
    """Why instances of a dataclass cannot be made field by field; empty if they can."""
    strange = [base for base in cls.__mro__ if not _is_harmless_base(base)]
    if strange:
        return f"its base {type_name(strange[0])} is no dataclass"
    if _class_attribute(cls, "__new__") is not object.__new__ or hasattr(cls, "__del__"):
        return "its class has a __new__ or __del__ of its own"
    hooked = [name for name in cls.__dict__["__dataclass_fields__"] if _is_hooked(cls, name)]
    return f"code of its class stands in the place of field {hooked[0]}" if hooked else ""


def _is_harmless_base(base: type) -> bool:
    return base in (object, abc.ABC, typing.Generic) or "__dataclass_fields__" in base.__dict__


def _is_hooked(cls: type, name: str) -> bool:
    attribute = _class_attribute(cls, name)
    return hasattr(type(attribute), "__set__") and not isinstance(attribute, types.MemberDescriptorType)


def _class_attribute(cls: type, name: str, default: object = None) -> object:
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), default)
