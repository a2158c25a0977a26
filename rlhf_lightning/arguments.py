"""Checks of a call's arguments against the annotations of the callee.

One mechanism for calls from Python (`checked`), for hyper-parameters (`Checked`) and for what a
configuration builds. Numbers, texts and truth values are strict: no text is read as a number, no
truth value as an integer, no fraction as a count; an integer is a float, and scalars of NumPy and
torch are Python's. Numbers have a size that float32 computes with. A class is checked by
isinstance, a protocol by its methods, a function by the number of its parameters. Limits stand in
the annotation: `Seed`, `Count` and the others below.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    NotRequired,
    Self,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)

from rlhf_lightning.misfit import Built, is_union, misfit, refuse_unknown, shown, without_markers

CallT = TypeVar("CallT", bound=Callable[..., Any])
LARGEST = 1e30  # larger sizes overflow in float32, where models compute, and 1 / LARGEST vanishes
LOWEST_TEMPERATURE = 0.01


@dataclass(frozen=True)
class NamedAgain:
    """Marks a parameter whose value runs code, or sends data or secrets away.

    A run folder may come from someone else: such a value in it has to be named again by the user.
    """


@dataclass(frozen=True)
class Default:
    """Marks an option of a `TypedDict` that has another default than None."""

    value: Any


def _limit(holds: Callable[[Any], bool], wanted: str) -> AfterValidator:
    """Return the limit of an annotation; `wanted` ends the sentence "it must be"."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError(f"={shown(value)} must be {wanted}")
        return value

    return AfterValidator(check)


Length = Annotated[int, Field(ge=1)]  # of what is only compared with it
Count = Annotated[int, Field(ge=1, lt=2**63)]
Size = Annotated[int, Field(ge=1, le=10**9)]  # of what is held in memory
CountOrZero = Annotated[int, Field(ge=0, lt=2**63)]
Workers = Annotated[int, Field(ge=0, le=1024)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
AtLeast1 = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareAbove0 = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]  # of a timer
Epochs = Annotated[float, Field(gt=0, le=1e9)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Temperature = Annotated[
    float,
    Field(ge=0, le=10),
    _limit(
        lambda value: not 0 < value < LOWEST_TEMPERATURE,
        f"0 for greedy decoding, or at least {LOWEST_TEMPERATURE:g}: it divides the logits",
    ),
]


def _is_filled(value: str | Path) -> bool:
    """Return whether a path is not empty, which would be the working folder."""
    return bool(str(value).strip())


IS_PATH = _limit(_is_filled, "a file, a folder or a name")
PathOrName = Annotated[str | Path, IS_PATH]  # a path, or a name on the hub
PathStr = Annotated[str, IS_PATH]
Name = Annotated[str, _limit(_is_filled, "not empty")]
Line = Annotated[str, _limit(str.isprintable, "text without control characters")]
ChatTemplate = Annotated[str, _limit(_is_filled, "a template or its file")]
Names = Annotated[Sequence[Name], Field(min_length=1)]
JsonObject = Mapping[str, Any]
TokenId = CountOrZero
StopIds = Sequence[TokenId]
FLOATING = _limit(lambda dtype: dtype.is_floating_point, "a floating dtype, such as torch.bfloat16")
_IN_FLOAT32 = _limit(
    lambda value: not value or 1 / LARGEST <= abs(value) <= LARGEST,
    f"0 or of a size from {1 / LARGEST:g} to {LARGEST:g}, with which float32 computes",
)

CodeName = Annotated[str, NamedAgain()]  # `path.py:name` or `package.module.name`
Program = Annotated[PathStr, NamedAgain()]
Address = Annotated[str, NamedAgain()]
SecretName = Annotated[Name, NamedAgain()]  # of an environment variable
RunsCode = Annotated[bool, NamedAgain()]  # true runs the code of a model


def fitting(key: str, value: Any, hint: Any) -> Any:
    """Return `value` if it may be given for `hint`, its numbers as Python's of that type.

    Args:
        key: name of the argument, for the message.
        value: value to check, any object.
        hint: annotation of the argument.

    Raises:
        TypeError: for another type, naming the argument, what it got and what it wants.
        ValueError: for a value out of range.
    """
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise misfit(key, value, hint, error) from None


def checked(
    call: CallT | None = None, /, *, but: tuple[str, ...] = (), annotated: Any = None
) -> Any:
    """Decorate a function or a class: wrong arguments are refused at the call that has them.

    Args:
        call: a function, or a class whose `__init__` is checked.
        but: arguments that the function checks itself.
        annotated: what has its annotations; None for `call`. A class resolves those of its bases.

    Raises:
        TypeError: by the decorated call, for a value that its annotation does not allow.
    """
    if call is None:
        return functools.partial(checked, but=but, annotated=annotated)
    if inspect.isclass(call):
        wrapped = checked(call.__init__, but=but, annotated=call)  # type: ignore[misc]
        call.__init__ = wrapped  # type: ignore[misc, method-assign]
        return call
    signature = _signature(call)

    @functools.wraps(call)
    def checking(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{call.__qualname__}() {error}") from None
        hints = annotations_of(annotated or call)
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if name in hints and name not in but and kind not in (2, 4):  # *args, **kwargs
                bound.arguments[name] = fitting(name, value, hints[name])
        bound.apply_defaults()
        return call(*bound.args, **bound.kwargs)

    checking.__signature__ = signature  # type: ignore[attr-defined]
    return checking


def _signature(call: Callable[..., Any]) -> inspect.Signature:
    """Return a signature in which `**options: Unpack[T]` is the keys of the `TypedDict` T.

    An option that may be left out is None then, or its `Default`.
    """
    found = inspect.signature(call)
    named = list(found.parameters.values())
    written: Any = named[-1].annotation if named else ""  # a text under `annotations` of __future__
    if "Unpack[" not in str(written) and get_origin(written) is not Unpack:
        return found
    last = named.pop()
    (options,) = get_args(typing.get_type_hints(call, include_extras=True)[last.name])
    for name, hint in typing.get_type_hints(options, include_extras=True).items():
        optional = not options.__total__ or get_origin(hint) is NotRequired
        hint = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        marked = [m.value for m in getattr(hint, "__metadata__", ()) if isinstance(m, Default)]
        default = [*marked, None][0] if optional else last.empty
        named.append(inspect.Parameter(name, last.KEYWORD_ONLY, default=default, annotation=hint))
    return found.replace(parameters=named)


@functools.cache
def annotations_of(call: Any) -> dict[str, Any]:
    """Return the annotations of a function, or of the constructor of a class, markers included."""
    found = inspect.unwrap(call.__init__ if inspect.isclass(call) else call)
    fields_of = call if inspect.isclass(call) and "__dataclass_params__" in vars(call) else found
    hints = typing.get_type_hints(fields_of, include_extras=True)  # in the modules of its bases
    own = inspect.signature(found).parameters
    options = {k: p.annotation for k, p in _signature(found).parameters.items() if k not in own}
    return options | {name: hint for name, hint in hints.items() if get_origin(hint) is not Unpack}


def may_stand_for(product: Any, hint: Any) -> bool:
    """Return whether what has the annotation `product` may be given where `hint` is wanted."""
    product, hint = without_markers(product), without_markers(hint)
    if product is Any:  # of code that the user trusts and that does not say
        return True
    if is_union(hint):
        return any(may_stand_for(product, option) for option in get_args(hint))
    if get_origin(hint) is collections.abc.Callable or hint is collections.abc.Callable:
        wanted = get_args(hint)[1:] or (Any,)
        found = _returned(product)
        return found is not None and (wanted[0] is Any or may_stand_for(found, wanted[0]))
    kind, wanted_kind = get_origin(product) or product, get_origin(hint) or hint
    if not inspect.isclass(kind) or not inspect.isclass(wanted_kind):
        return False
    if not _is_a(kind, wanted_kind, issubclass):
        return False
    pairs = zip(get_args(product), get_args(hint), strict=False)
    return all(one == other or may_stand_for(one, other) for one, other in pairs)


def _returned(product: Any) -> Any:
    """Return what calls of a product return, None if it cannot be called or does not say."""
    if get_origin(product) is collections.abc.Callable:
        return get_args(product)[-1]
    method = _method(product, "__call__") if inspect.isclass(product) else None
    return annotations_of(method).get("return") if inspect.isfunction(method) else None


def _is_a(found: Any, kind: Any, test: Callable[[Any, Any], bool]) -> bool:
    """Return whether a class or an instance is one of a kind: of a protocol, has its methods."""
    if not getattr(kind, "_is_protocol", False):
        return test(found, kind)
    wanted = [n for n, v in vars(kind).items() if callable(v) and (n[0] != "_" or n == "__call__")]
    return all(callable(_method(found, name)) for name in wanted)


def _method(found: Any, name: str) -> Any:
    """Return a method that instances have: every class itself has the `__call__` of its type."""
    if not inspect.isclass(found):
        return getattr(found, name, None)
    return next((vars(base)[name] for base in found.__mro__ if name in vars(base)), None)


@functools.lru_cache(maxsize=4096)
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(hint), config=ConfigDict(allow_inf_nan=False))


def _strict(hint: Any) -> Any:
    """Return the hint with strict scalars, and with classes that are checked by isinstance."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(_strict(arguments[0]), *arguments[1:])]  # type: ignore[return-value]
    if hint in (int, float, str, bool):
        limits = (_IN_FLOAT32,) if hint in (int, float) else ()
        return Annotated[(hint, Strict(), BeforeValidator(_plain_scalar), *limits)]  # type: ignore[return-value]
    if hint in (Any, None, type(None), Ellipsis) or origin is Literal:
        return hint
    if is_union(hint):
        return Union[tuple(map(_strict, arguments))]  # noqa: UP007
    if inspect.isclass(origin) and issubclass(origin, collections.abc.Collection):
        inside = origin[tuple(map(_strict, arguments))]  # type: ignore[index]
        return Annotated[inside, WrapValidator(functools.partial(_collection, hint))]
    if not inspect.isclass(origin or hint):
        return Any
    return Annotated[Any, PlainValidator(functools.partial(_instance, hint))]


def _instance(hint: Any, value: Any) -> Any:
    kind = get_origin(hint) or hint
    if isinstance(value, Built):
        fits = may_stand_for(value.product, hint)
        value.is_placed |= fits
    elif kind is Path:
        fits = isinstance(value, str | os.PathLike)
    elif kind is collections.abc.Callable:
        fits = _is_called_as(hint, value)
    else:
        is_class = inspect.isclass(value) and getattr(kind, "_is_protocol", False)
        fits = not is_class and _is_a(value, kind, isinstance)
    if not fits:
        raise AssertionError(_named(hint))
    return value


def _is_called_as(hint: Any, value: Any) -> bool:
    """Return whether a value can be called with the arguments of a `Callable`, for its product."""
    takes, gives = get_args(hint) or (Ellipsis, Any)
    if not callable(value):
        return False
    if inspect.isclass(value) and gives is not Any and not may_stand_for(value, gives):
        return False
    try:
        if get_origin(takes) is Concatenate:  # and further ones, by name
            inspect.signature(value).bind_partial(*get_args(takes)[:-1])
        else:
            takes is Ellipsis or inspect.signature(value).bind(*takes)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


def _named(hint: Any) -> str:
    if get_origin(hint) is not collections.abc.Callable:
        return str((get_origin(hint) or hint).__name__)
    takes, gives = get_args(hint)
    takes = get_args(takes)[:-1] if get_origin(takes) is Concatenate else takes
    named = "a function" if takes is Ellipsis else f"a function of {len(takes)} arguments"
    return named + (f" that gives {getattr(gives, '__name__', gives)}" * (gives is not Any))


def _collection(hint: Any, value: Any, validate: Callable[[Any], Any]) -> Any:
    if isinstance(value, Built):
        return _instance(hint, value)
    found = validate(value)
    return found if type(value) in (list, tuple, dict) else value


def _plain_scalar(value: Any) -> Any:
    """Return a scalar of NumPy or torch as Python's, everything else as it is."""
    is_scalar = type(value).__module__ in ("numpy", "torch") and getattr(value, "shape", 0) == ()
    return value.item() if is_scalar else value


class UnusualHparamWarning(UserWarning):
    """A hyper-parameter lies outside the range that published runs use."""


@dataclass(frozen=True)
class Usual:
    """Marks an annotation with the range of published runs; `Checked` warns outside of it."""

    low: float
    high: float


class Checked:
    """Mixin: hold every field against its annotation and its usual range."""

    def __post_init__(self) -> None:
        hints, names = annotations_of(type(self)), [one.name for one in fields(self)]  # type: ignore[arg-type]
        for name in names:
            object.__setattr__(self, name, fitting(name, getattr(self, name), hints[name]))
        for name in names:
            value, usual = getattr(self, name), self._usual(name, hints[name])
            if usual is None or isinstance(value, bool | str | None):
                continue
            if not usual.low <= value <= usual.high:
                warnings.warn(
                    f"{type(self).__name__}.{name}={value:g} is outside the usual range "
                    f"{usual.low:g} to {usual.high:g}",
                    UnusualHparamWarning,
                    stacklevel=3,
                )

    @classmethod
    def of_node(cls, node: object, where: str) -> Self:
        """Return what a configuration says; its `_target_` is not looked at.

        Args:
            node: the fields, plain values.
            where: place in the configuration.

        Raises:
            ValueError: for an unknown field, a wrong type or range, with its place.
        """
        if not isinstance(node, Mapping):
            raise ValueError(f"{where}={node!r} must be a group of settings")
        given = {str(key): value for key, value in node.items() if key != "_target_"}
        known = [one.name for one in fields(cls)]  # type: ignore[arg-type]
        refuse_unknown(given, known, cls.__name__, where)
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}.{error}") from error

    def _usual(self, name: str, hint: Any) -> Usual | None:
        """Return the usual range of a field; None: whatever is possible."""
        markers = getattr(hint, "__metadata__", ())
        return next((one for one in markers if isinstance(one, Usual)), None)


def check_order(settings: object, lower: str, upper: str, why: str) -> None:
    """Check that one field of some settings is not below another one.

    Raises:
        ValueError: naming both.
    """
    low, high = getattr(settings, lower), getattr(settings, upper)
    if high < low:
        raise ValueError(f"{lower}={low:g} is above {upper}={high:g}: {why}")
