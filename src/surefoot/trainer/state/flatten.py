"""Flattens the user's objects to named tensors, typed plain values, and the structure in which they stand.

    {"$dict": [[key, node], …], "type": "dict" or "OrderedDict"}
    {"$list": [node, …], "type": "list" or "tuple"}
    {"$tensor": name}, with "whole", the whole tensor's shape, where the tensor is a block of a sharded one
    {"$wrapped": [module, class], "shape": …, "stride": …, "inner": [[attribute, node], …], "context": node}
    {"$value": index}

Only containers that have a tensor somewhere inside are taken apart; a subtree of plain values is one value, so that a
growing list does not make a new structure. The structure is part of the plan, the values are part of each record.
"""

from __future__ import annotations

import gc
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from surefoot.core.dtypes import ITEM_BYTES
from surefoot.core.image import is_tensor_name
from surefoot.core.plan import Spread
from surefoot.core.values import decode, encode
from surefoot.errors import CorruptError, UnsupportedStateError
from surefoot.trainer.state.numpy_values import EXTRAS
from surefoot.trainer.state.sharded import Place, place_of
from surefoot.trainer.state.wrapped import Wrapped, is_wrapped, parts_of

Node = dict[str, Any]
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict}
_LISTS: dict[str, type[list[Any]] | type[tuple[Any, ...]]] = {"list": list, "tuple": tuple}


@dataclass(slots=True)
class NamedTensor:
    """A tensor to be checkpointed, aliasing the live one; of a sharded tensor, the part that this rank has."""

    name: str
    tensor: torch.Tensor
    spread: Spread
    place: Place | None = None
    """For a sharded tensor: where this part lies in the whole."""
    frozen: bool = False
    """True if it never changes, and is saved outside the slots."""


@dataclass(frozen=True, slots=True)
class Flat:
    """All state of one rank at one moment."""

    tensors: list[NamedTensor]
    values: list[Any]
    """Encoded, by index."""
    structure: str
    signed: Signed | None = None

    def signature(self) -> tuple[Any, ...]:
        """Equal as long as the plan fits."""
        signed = self.signed
        if signed is None or signed.tensors is not self.tensors:
            return self._sign()
        if signed.last.signature is None:
            signed.last.signature = self._sign()
        return signed.last.signature

    def _sign(self) -> tuple[Any, ...]:
        with uncollected():
            return (
                self.structure,
                [(t.name, t.tensor.dtype, t.tensor.shape, t.spread, t.place, t.frozen) for t in self.tensors],
            )


@dataclass(slots=True)
class LastSignature:
    """A signature that is made when first needed, and is valid as long as nothing structural changes."""

    signature: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature that several states share, because nothing structural changed between them."""

    tensors: list[NamedTensor]
    """The tensors to which it belongs: other tensors in their place have another signature."""
    last: LastSignature


@dataclass(frozen=True, slots=True)
class Head:
    """A named tensor without the tensor: which one it is, by its number among those of its tree."""

    name: str
    spread: Spread
    place: Place | None
    number: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The result of one tree, given the trees before it. It holds no tensor, so it keeps no memory alive."""

    name: str
    node: str
    """JSON text."""
    heads: list[Head]
    kinds: list[tuple[torch.dtype, torch.Size]]
    met: int
    """Number of tensors, tied ones too."""
    values: int
    """Number of plain values."""
    seen: dict[tuple[Any, ...], str]
    names: dict[str, int]


class Flattener:
    """One pass over the objects' trees."""

    def __init__(self, replicated: frozenset[int]) -> None:
        self._replicated = replicated
        """Storage addresses of tensors that are equal on all ranks by construction."""
        self.tensors: list[NamedTensor] = []
        self.values: list[Any] = []
        self._names: dict[str, int] = {}
        self._named: list[str] = []
        """The names that this tree has put into `_names`."""
        self._seen: dict[tuple[Any, ...], str] = {}
        self._met = 0
        """Tensors met so far in this tree, tied ones too."""
        self._numbers: list[int] = []
        """For each named tensor, its number among those met in its tree."""
        self._replicated_prefixes: tuple[str, ...] = ()

    def flatten(self, trees: Mapping[str, Any], replicated_names: Sequence[str] = ()) -> Flat:
        """Flatten named trees.

        Raises:
            UnsupportedStateError: a value in them cannot be checkpointed; the message names its path.
        """
        self.believe(replicated_names, self._replicated)
        nodes = {name: self.walk(name, tree).node for name, tree in trees.items()}
        return self.flat(join(nodes))

    def believe(self, replicated_names: Sequence[str], addresses: frozenset[int]) -> None:
        """Mark all tensors under these names and at these addresses as equal on all ranks by construction."""
        self._replicated_prefixes = tuple(f"{name}." for name in replicated_names)
        self._replicated = addresses

    def walk(self, name: str, tree: Any) -> Segment:
        """Take in one tree.

        Raises:
            UnsupportedStateError: a value in it cannot be checkpointed; the message names its path.
        """
        self._met = 0
        self._named.clear()
        tensors, values, seen = len(self.tensors), len(self.values), len(self._seen)
        node = json.dumps(self._tree(tree, name), separators=(",", ":"))
        new = self.tensors[tensors:]
        heads = [Head(t.name, t.spread, t.place, n) for t, n in zip(new, self._numbers[tensors:], strict=True)]
        return Segment(
            name,
            node,
            heads,
            [(t.tensor.dtype, t.tensor.shape) for t in new],
            self._met,
            len(self.values) - values,
            dict(islice(self._seen.items(), seen, None)),
            {name: self._names[name] for name in self._named},
        )

    def replay(self, segment: Segment, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> None:
        """Take in a tree's earlier result, with the tensors met in it now and its values as of now."""
        heads = segment.heads
        live = tensors if len(heads) == segment.met else [tensors[head.number] for head in heads]
        aliases = [tensor.detach() if tensor.requires_grad else tensor for tensor in live]
        self.tensors += [NamedTensor(h.name, t, h.spread, h.place) for h, t in zip(heads, aliases, strict=True)]
        self._numbers += [head.number for head in heads]
        self.values.extend(values)
        self._seen.update(segment.seen)
        self._names.update(segment.names)

    def flat(self, structure: str, last: LastSignature | None = None) -> Flat:
        """The state that all trees so far make up."""
        return Flat(self.tensors, self.values, structure, Signed(self.tensors, last or LastSignature()))

    def _append(self, name: str, tensor: torch.Tensor, spread: Spread, place: Place | None, number: int) -> None:
        alias = tensor.detach() if tensor.requires_grad else tensor
        self.tensors.append(NamedTensor(name, alias, spread, place))
        self._numbers.append(number)

    def _tree(self, value: Any, path: str) -> Node:
        try:
            return self._walk(value, path) or self._value(value, path)
        except RecursionError as error:
            raise UnsupportedStateError(f"{path}: contains itself, or is nested too deeply to be saved") from error

    def _walk(self, value: Any, path: str) -> Node | None:
        """The node of a subtree with a tensor in it; None for plain values."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) in (dict, OrderedDict):
            nodes = [self._walk(item, f"{path}.{key}") for key, item in value.items()]
            if not any(nodes):
                return None
            pairs = [
                [
                    key if _is_plain(key) else encode(key, path, extras=EXTRAS),
                    node or self._value(item, f"{path}.{key}"),
                ]
                for (key, item), node in zip(value.items(), nodes, strict=True)
            ]
            return {"$dict": pairs, "type": type(value).__name__}
        if type(value) in (list, tuple):
            nodes = [self._walk(item, f"{path}.{index}") for index, item in enumerate(value)]
            if not any(nodes):
                return None
            items = [
                node or self._value(item, f"{path}.{index}")
                for index, (item, node) in enumerate(zip(value, nodes, strict=True))
            ]
            return {"$list": items, "type": type(value).__name__}
        return None

    def _value(self, value: Any, path: str) -> Node:
        self.values.append(encode(value, path, extras=EXTRAS))
        return {"$value": len(self.values) - 1}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Node:
        if type(tensor) not in _PLAIN_TENSORS and not isinstance(tensor, DTensor) and is_wrapped(tensor):
            return self._wrapped(tensor, path)
        number = self._met
        self._met += 1
        if isinstance(tensor, DTensor):
            return self._sharded(tensor, path, number)
        check_keepable(tensor, path)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        known = self._seen.get(key) if tensor.numel() else None
        if known is None:
            known = self._seen[key] = self._unique(_readable(path))
            self._append(known, tensor, self._spread(tensor, path), None, number)
        # A tied tensor is saved once: the second place refers to the name of the first.
        return {"$tensor": known}

    def _wrapped(self, tensor: torch.Tensor, path: str) -> Node:
        check_layout(tensor, path)
        attributes, context = parts_of(tensor)
        inner = [[name, self._tensor(getattr(tensor, name), f"{path}.{name}")] for name in attributes]
        return {
            "$wrapped": [type(tensor).__module__, type(tensor).__qualname__],
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "inner": inner,
            "context": self._value(context, f"{path} (the context of its class)"),
        }

    def _sharded(self, tensor: DTensor, path: str, number: int) -> Node:
        local, place = tensor._local_tensor, place_of(tensor, path)
        check_keepable(local, path)
        # Ties must be found on all ranks alike, also where a rank has an empty block: its memory may be padded.
        storage = local.untyped_storage()
        key = (storage.data_ptr(), local.storage_offset(), local.dtype, local.shape, local.stride(), place)
        known = self._seen.get(key) if storage.nbytes() else None
        if known is None:
            known = self._seen[key] = self._unique(_readable(path))
            self._append(known, local, "sharded", place, number)
        return {"$tensor": known, "whole": list(place.whole)}

    def _spread(self, tensor: torch.Tensor, path: str) -> Spread:
        if tensor.data_ptr() in self._replicated and tensor.numel():
            return "replicated"
        return "replicated" if path.startswith(self._replicated_prefixes) else "local"

    def _unique(self, name: str) -> str:
        # Names are for people and stock readers; the structure refers to them, so nothing has to parse them.
        count = self._names.get(name, 0) + 1
        self._names[name] = count
        self._named.append(name)
        return name if count == 1 else self._unique(f"{name}~{count}")


def join(nodes: Mapping[str, str]) -> str:
    """The structure of all trees, from each tree's as JSON text."""
    pairs = ",".join(f"[{json.dumps(name)},{node}]" for name, node in nodes.items())
    return f'{{"$dict":[{pairs}],"type":"dict"}}'


TensorOf = Callable[[str, Sequence[int] | None], Any]
"""Given a tensor's name and, for a block of a sharded one, the whole tensor's shape: the object to put there."""


def unflatten(structure: str, tensor_of: TensorOf, values: Sequence[Any]) -> dict[str, Any]:
    """Rebuild the trees, with their values decoded, and `Wrapped` in the place of each wrapped tensor.

    Raises:
        CorruptError: structure and values do not fit.
    """
    try:
        tree = _build(json.loads(structure), tensor_of, values)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptError(f"a checkpoint's structure does not fit its values: {error!r}") from error
    assert isinstance(tree, dict)
    return tree


def check_keepable(tensor: torch.Tensor, path: str) -> None:
    """Refuse, by path, a tensor that is not dense or not of a known element type."""
    if type(tensor) not in _PLAIN_TENSORS:
        raise UnsupportedStateError(f"{path}: tensors of class {type(tensor).__name__} cannot be checkpointed")
    check_layout(tensor, path)
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        raise UnsupportedStateError(f"{path}: tensors of type {tensor.dtype} cannot be checkpointed")


def check_layout(tensor: torch.Tensor, path: str) -> None:
    """Refuse, by path, a tensor that is not dense."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise UnsupportedStateError(f"{path}: only dense tensors can be checkpointed, this one is {tensor.layout}")
    if tensor.is_meta:
        raise UnsupportedStateError(f"{path}: a meta tensor has no bytes to save")


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop the search for cycles while thousands of nodes are made, none in a cycle: each search would walk the
    heap."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _readable(path: str) -> str:
    """A tensor's name from its path; other text only where the path cannot be a name."""
    # Most paths are plain, and this is asked for every tensor at every boundary.
    plain = path.isascii() and not path.startswith("_")
    return path if plain or is_tensor_name(path) else ascii(path)


def _is_plain(key: object) -> bool:
    """True for a key that is its own encoding."""
    return type(key) is str and key.isascii()


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _build(node: Node, tensor_of: TensorOf, values: Sequence[Any]) -> Any:
    if "$tensor" in node:
        return tensor_of(node["$tensor"], node.get("whole"))
    if "$wrapped" in node:
        module, qualname = node["$wrapped"]
        inner = {name: _build(child, tensor_of, values) for name, child in node["inner"]}
        context = values[node["context"]["$value"]]
        return Wrapped(module, qualname, tuple(node["shape"]), tuple(node["stride"]), inner, context)
    if "$value" in node:
        return decode(values[node["$value"]], extras=EXTRAS)
    if "$dict" in node:
        pairs = ((decode(key, extras=EXTRAS), _build(child, tensor_of, values)) for key, child in node["$dict"])
        return _DICTS[node["type"]](pairs)
    return _LISTS[node["type"]](_build(child, tensor_of, values) for child in node["$list"])
