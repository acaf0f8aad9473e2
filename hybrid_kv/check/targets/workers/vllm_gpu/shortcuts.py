"""Short ways through Triton's interpreter, for the commonest operations alone.

An operator of the language finds the common type of its operands, broadcasts both and makes a type
and a shape for its result, in Python: ten times the work of numpy's own call. Here operands of one
type, blocks with scalars, and pointers with offsets go to numpy at once. All others go Triton's
way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from triton.language import random as philox
from triton.runtime import interpreter

tl = interpreter.tl
core = tl.core
Tensor = core.tensor
Handle = interpreter.TensorHandle
Slow = Callable[..., Any]

NUMPY: dict[str, Any] = {
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "fp32": np.dtype(np.float32),
    "int1": np.dtype(np.bool_),
}


def _quotient(a: Any, b: Any) -> Any:
    """Divide towards zero, as the language does and numpy does not."""
    return (a - np.fmod(a, b)) // b


ARITHMETIC = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
}
DIVISIONS = {"__floordiv__": _quotient, "__mod__": np.fmod}
LOGIC = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
COMPARISONS = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
INTEGERS = (core.int32, core.int64)
NUMBERS = (*INTEGERS, core.float32)
STORED = (*NUMBERS, core.uint64)  # addresses, too
BYTES = {"int8": 1, "int32": 4, "int64": 8, "uint64": 8, "fp32": 4}  # of what a pointer points to
_blocks: dict[tuple[Any, ...], Any] = {}
_shapes: dict[tuple[Any, ...], Any] = {}


def _block_once(cls: type, element_ty: Any, shape: Any) -> Any:
    """Return the block type that was made before of the same element and shape."""
    sizes = tuple(core._unwrap_if_constexpr(size) for size in shape)
    space = getattr(element_ty, "address_space", None)
    key = (element_ty.name, space, sizes)
    if key not in _blocks:
        _blocks[key] = object.__new__(cls)
    return _blocks[key]


def _keep_shape(init: Slow) -> Slow:
    """Return a `tensor.__init__` that makes the shape of a type once."""

    def of(self: Any, handle: Any, type: Any) -> None:
        shape = type.__dict__.get("shape_of_tensors")
        if shape is None:
            init(self, handle, type)
            type.shape_of_tensors = (self.shape, self.numel, self.dtype)
            return
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = shape

    return of


def _init_once(init: Slow) -> Slow:
    """Return a `block_type.__init__` that leaves a type alone that was made before.

    Equal shapes are one object.
    """

    def of(self: Any, element_ty: Any, shape: Any) -> None:
        if "numel" not in self.__dict__:
            init(self, element_ty, shape)
            self.shape = _shapes.setdefault(tuple(self.shape), self.shape)

    return of


def made(data: Any, scalar: Any, type: Any) -> Any:
    """Return a tensor, without a look at the size of its numbers."""
    handle = object.__new__(Handle)
    handle.data, handle.dtype, handle.attr = data, scalar, {}
    return Tensor(handle, type)


@cache
def _number(value: int, name: str) -> Any:
    """Return a number as the interpreter holds a scalar: an array of one element."""
    return np.full(1, value, NUMPY[name])


def _common(a: Any, b: Any) -> Any:
    """Return the type of an operation on tensors of two types; None: a slow one."""
    if a is b:
        return a
    if a.is_block() and b.is_block() and a.shape is not b.shape:
        return None
    block = a if a.is_block() else b
    if a.scalar is b.scalar:
        return block
    if a.scalar in INTEGERS and b.scalar in INTEGERS:
        return _with_element(block, core.int64)
    return None


def _operands(one: Any, other: Any) -> tuple[Any, Any] | None:
    """Return the common type of two operands, and the second one as numpy takes it; or None."""
    if type(other) is Tensor:
        common = _common(one.type, other.type)
        return None if common is None else (common, other.handle.data)
    if one.dtype is core.int1 or not _is_small(other):  # a bit becomes a number
        return None
    return one.type, _number(other, one.dtype.name)


def _is_small(value: Any) -> bool:
    """Return whether it is an integer of the host that takes the type of what it meets."""
    return type(value) is int and -(2**31) <= value < 2**31


def _operator(slow: Slow, kinds: Sequence[Any], function: Any, element: Any = None) -> Slow:
    """Return an operator on tensors of some types; `element` is the result's, if it is another."""

    def of(self: Any, other: Any, **named: Any) -> Any:
        operands = _operands(self, other) if self.dtype in kinds else None
        if operands is None:
            return slow(self, other, **named)
        common, value = operands
        data = function(self.handle.data, value)
        result = common if element is None else _with_element(common, element)
        return made(data, common.scalar, result)

    return of


def _with_element(type: Any, element: Any) -> Any:
    """Return the type of a block of the same shape, or of a scalar, of other elements."""
    if not type.is_block():
        return element
    others = type.__dict__.setdefault("others", {})
    if element.name not in others:
        others[element.name] = type.with_element_ty(element)
    return others[element.name]


def _pointer_offset(slow: Slow) -> Slow:
    """Return an addition in which a pointer and an offset take the short way, too."""

    def of(self: Any, other: Any, **named: Any) -> Any:
        pointer = self.dtype
        if not pointer.is_ptr() or type(other) is not Tensor or other.dtype not in INTEGERS:
            return slow(self, other, **named)
        size = BYTES.get(pointer.element_ty.name)
        result = self.type
        if other.type.is_block():
            if not result.is_block():
                result = core.block_type(result, other.type.shape)
            elif result.shape is not other.type.shape:
                size = None
        if size is None:
            return slow(self, other, **named)
        data = self.handle.data + size * other.handle.data.astype(np.uint64)
        return made(data, self.handle.dtype, result)

    return of


def _load(slow: Slow) -> Slow:
    def of(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
        chosen = None if named else _chosen(pointer, mask)
        is_filled = other is None or (mask is not None and type(other) is int)
        if chosen is None or not is_filled:
            return slow(pointer, mask, other, **named)
        element = pointer.dtype.element_ty
        places = pointer.handle.data
        rest = _filled(places.shape, other or 0, element.name)
        data = interpreter._interpreter.load(places, chosen, rest, rest.dtype)
        return made(data, element, _with_element(pointer.type, element))

    return of


def _store(slow: Slow) -> Slow:
    def of(pointer: Any, value: Any, mask: Any = None, **named: Any) -> Any:
        chosen = None if named else _chosen(pointer, mask)
        is_same = type(value) is Tensor and value.handle.data.shape == pointer.handle.data.shape
        if chosen is None or not is_same or value.dtype is not pointer.dtype.element_ty:
            return slow(pointer, value, mask, **named)
        return interpreter._interpreter.store(pointer.handle.data, value.handle.data, chosen)

    return of


def _chosen(pointer: Any, mask: Any) -> Any:
    """Return the bits of a mask, one for each pointer; None: another way is needed."""
    if not pointer.dtype.is_ptr() or pointer.dtype.element_ty not in STORED:
        return None
    shape = pointer.handle.data.shape
    if mask is None:
        return _filled(shape, 1, "int1")
    if type(mask) is not Tensor or mask.dtype is not core.int1:
        return None
    bits = mask.handle.data
    return bits if bits.dtype == np.bool_ and bits.shape == shape else None


@cache
def _filled(shape: tuple[int, ...], value: int, name: str) -> Any:
    """Return a read-only array, the same one for equal arguments."""
    filled = np.full(shape, value).astype(NUMPY[name])
    filled.flags.writeable = False
    return filled


def _where(slow: Slow) -> Slow:
    def of(condition: Any, x: Any, y: Any, **named: Any) -> Any:
        is_short = not named and type(condition) is Tensor and condition.dtype is core.int1
        if not is_short or type(x) is not Tensor or x.dtype not in NUMBERS:
            return slow(condition, x, y, **named)
        operands = _operands(x, y)
        block = None if operands is None else _common_block(condition.type, operands[0])
        if operands is None or block is None or operands[0].scalar is not x.dtype:
            return slow(condition, x, y, **named)
        return made(np.where(condition.handle.data, x.handle.data, operands[1]), x.dtype, block)

    return of


def _common_block(condition: Any, chosen: Any) -> Any:
    """Return the type of what a condition chooses; None: the shapes of two blocks differ."""
    if not condition.is_block():
        return chosen
    if chosen.is_block():
        return chosen if chosen.shape is condition.shape else None
    return condition.with_element_ty(chosen)


def _philox(slow: Slow) -> Slow:
    """Return Philox-4x32 (Salmon et al., 2011), a few operations of numpy for each round."""
    half = np.uint64(32)

    def of(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any = 10) -> Any:
        is_one_type = all(counter.type is c0.type for counter in (c1, c2, c3))
        has_scalar_keys = k0.type is core.uint32 and k1.type is core.uint32
        if c0.dtype is not core.uint32 or not is_one_type or not has_scalar_keys:
            return slow(c0, c1, c2, c3, k0, k1, n_rounds)
        a, b, c, d = (counter.handle.data for counter in (c0, c1, c2, c3))
        key = k0.handle.data
        other_key = k1.handle.data
        for _ in range(core._unwrap_if_constexpr(n_rounds)):
            product = np.uint64(0xCD9E8D57) * c
            other = np.uint64(0xD2511F53) * a
            a = (product >> half).astype(np.uint32) ^ b ^ key
            c = (other >> half).astype(np.uint32) ^ d ^ other_key
            b = product.astype(np.uint32)
            d = other.astype(np.uint32)
            key = key + np.uint32(0x9E3779B9)
            other_key = other_key + np.uint32(0xBB67AE85)
        return tuple(made(each, core.uint32, c0.type) for each in (a, b, c, d))

    return of


def _put(place: Any, name: str, make: Callable[..., Slow], *of: Any) -> None:
    setattr(place, name, make(getattr(place, name), *of))


def install_types() -> None:
    """Let types and shapes be made once."""
    core.block_type.__new__ = staticmethod(_block_once)
    _put(core.block_type, "__init__", _init_once)
    _put(Tensor, "__init__", _keep_shape)


@cache
def install_operators() -> None:
    """Let operators of tensors, which Triton has patched, take the short way."""
    function: Any
    for name, function in ARITHMETIC.items():
        _put(Tensor, name, _operator, NUMBERS, function)
    for name, function in LOGIC.items():
        _put(Tensor, name, _operator, (core.int1,), function)
    for name, function in DIVISIONS.items():
        _put(Tensor, name, _operator, INTEGERS, function)
    for name, function in COMPARISONS.items():
        _put(Tensor, name, _operator, NUMBERS, function, core.int1)
    _put(Tensor, "__add__", _pointer_offset)
    _put(philox, "philox_impl", _philox)


@cache
def install_memory(language: Any) -> None:
    """Let loads and stores of a module of the language, which Triton has patched, do the same."""
    _put(language, "load", _load)
    _put(language, "store", _store)
    _put(language, "where", _where)
