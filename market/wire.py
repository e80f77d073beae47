"""Frozen dataclasses to JSON and back, and the JSON Schema of each: one description, three uses.

What server and client say to each other is declared once, in `market.messages`. This module turns the
declared types into JSON (keys in base58, other bytes in hexadecimal, documents in URL-safe base64) and
refuses anything that does not fit, so the OpenAPI document made from the same types is true.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, NewType, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from relay.errors import ConfigError, IdentityError, RemoteProtocolError
from relay.identity import ExchangePublic, PublicKey, SignedDocument, address_of, parse_address

from .plans import PlanId
from .requests import decode_bytes, encode_bytes
from .wallet import Grant, grant_hash, parse_challenge
from .windows import Window

LeaseId = NewType("LeaseId", bytes)
"""The 16 random bytes that name a lease."""

Hash = NewType("Hash", bytes)
"""A SHA-256, 32 bytes."""

BackboneId = NewType("BackboneId", bytes)
"""The 16 bytes that name a backbone; they survive the renewal of its keys."""

RecordId = NewType("RecordId", bytes)
"""The 16 random bytes that name a record about a wallet."""

MoveId = NewType("MoveId", bytes)
"""The 16 random bytes that name a move of a replica."""

MAX_TEXT: Final = 4096
MAX_ITEMS: Final = 200_000
MAX_INTEGER: Final = (1 << 63) - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Codec:
    """One type's three uses."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any, str], Any]
    schema: Mapping[str, Any]


def to_json(value: object) -> dict[str, Any]:
    """The JSON object of a message dataclass."""
    return cast(dict[str, Any], _codec(type(value)).encode(value))


def from_json(kind: type[T], data: object) -> T:
    """Read a message of `kind`. Raises `RemoteProtocolError` naming the field that does not fit.

    Fields that this version does not know are ignored; fields with a default may be absent.
    """
    return cast(T, _codec(kind).decode(data, kind.__name__))


def padding(size: int) -> tuple[str, ...]:
    """`size` random characters as texts of lengths that a message may hold: what a link probe carries."""
    text = secrets.token_urlsafe(size)[:size]
    return tuple(text[start : start + MAX_TEXT] for start in range(0, size, MAX_TEXT))


def schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema (as OpenAPI 3.1 takes it) of a type, nested messages by reference."""
    return dict(_codec(kind).schema)


def object_schema(kind: type) -> dict[str, Any]:
    """The JSON Schema that references to a message dataclass resolve to."""
    hints = get_type_hints(kind)
    names = dataclasses.fields(kind)
    return {
        "type": "object",
        "description": (kind.__doc__ or "").strip().split("\n")[0],
        "properties": {field.name: schema(hints[field.name]) for field in names},
        "required": [field.name for field in names if _is_required(field)],
    }


def nested(kind: Any) -> set[type]:
    """All message dataclasses that `kind` is or mentions."""
    if dataclasses.is_dataclass(kind) and kind not in _SIMPLE:
        found = {cast(type, kind)}
        for hint in get_type_hints(kind).values():
            found |= nested(hint)
        return found
    return set().union(*(nested(argument) for argument in get_args(kind))) if get_args(kind) else set()


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


# --- the types -----------------------------------------------------------------------------------------


def _fail(path: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{path} is missing or not {expected}")


def _integer(data: object, path: str) -> int:
    if type(data) is not int or not -MAX_INTEGER <= data <= MAX_INTEGER:
        raise _fail(path, "an integer of 64 bits")
    return data


def _number(data: object, path: str) -> float:
    if type(data) not in (int, float) or not math.isfinite(cast(float, data)):
        raise _fail(path, "a finite number")
    return float(cast(float, data))


def _text(data: object, path: str) -> str:
    if not isinstance(data, str) or len(data) > MAX_TEXT:
        raise _fail(path, f"a text of at most {MAX_TEXT} characters")
    return data


def _boolean(data: object, path: str) -> bool:
    if not isinstance(data, bool):
        raise _fail(path, "true or false")
    return data


def _hexadecimal(size: int) -> _Codec:
    def decode(data: object, path: str) -> bytes:
        if isinstance(data, str) and len(data) == 2 * size and data == data.lower() and data.isascii():
            try:
                return bytes.fromhex(data)
            except ValueError:
                pass
        raise _fail(path, f"{size} bytes in lower-case hexadecimal")

    pattern = {"type": "string", "pattern": f"^[0-9a-f]{{{2 * size}}}$"}
    return _Codec(lambda value: bytes(value).hex(), decode, pattern)


def _decode_key(data: object, path: str) -> PublicKey:
    try:
        return parse_address(_text(data, path))
    except IdentityError as error:
        raise RemoteProtocolError(f"{path}: {error}") from None


def _decode_window(data: object, path: str) -> Window:
    try:
        return Window.parse(_text(data, path))
    except ConfigError as error:
        raise RemoteProtocolError(f"{path}: {error}") from None


def _decode_document(data: object, path: str) -> SignedDocument:
    if not isinstance(data, str):
        raise _fail(path, "a signed document in URL-safe base64")
    return SignedDocument.from_bytes(decode_bytes(data, path))


def _decode_grant(data: object, path: str) -> Grant:
    """A grant as it was sent: parsed, its signature not verified (the reader does that)."""
    fields = data if isinstance(data, dict) else {}
    text = _text(fields.get("text"), f"{path}.text")
    signature = decode_bytes(_text(fields.get("signature"), f"{path}.signature"), f"{path}.signature", 64)
    try:
        parts = parse_challenge(text)
    except IdentityError as error:
        raise RemoteProtocolError(f"{path}: {error}") from None
    keys = (parts.wallet, parts.device, parts.exchange, parts.scope)
    return Grant(grant_hash(text), text, signature, *keys, parts.issued_at, parts.expires_at, parts.swarm)


def _same(value: Any) -> Any:
    return value


_GRANT_SCHEMA: Final = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "signature": {"type": "string"}},
    "required": ["text", "signature"],
}
_BASE58: Final = {"type": "string", "pattern": "^[1-9A-HJ-NP-Za-km-z]{32,44}$"}
_BASE64: Final = {"type": "string", "pattern": "^[A-Za-z0-9_-]*$"}
_SIMPLE: Final[Mapping[Any, _Codec]] = {
    int: _Codec(_same, _integer, {"type": "integer"}),
    float: _Codec(_same, _number, {"type": "number"}),
    str: _Codec(_same, _text, {"type": "string", "maxLength": MAX_TEXT}),
    bool: _Codec(_same, _boolean, {"type": "boolean"}),
    bytes: _Codec(encode_bytes, lambda data, path: decode_bytes(_text(data, path), path), _BASE64),
    PlanId: _hexadecimal(32),
    Hash: _hexadecimal(32),
    LeaseId: _hexadecimal(16),
    BackboneId: _hexadecimal(16),
    RecordId: _hexadecimal(16),
    MoveId: _hexadecimal(16),
    PublicKey: _Codec(address_of, _decode_key, _BASE58),
    ExchangePublic: _hexadecimal(32),
    Window: _Codec(lambda window: window.name, _decode_window, {"type": "string"}),
    SignedDocument: _Codec(lambda d: encode_bytes(d.to_bytes()), _decode_document, _BASE64),
    Grant: _Codec(
        lambda g: {"text": g.text, "signature": encode_bytes(g.signature)}, _decode_grant, _GRANT_SCHEMA
    ),
}


def _codec(kind: Any) -> _Codec:
    return _build(kind)


@cache
def _build(kind: Any) -> _Codec:
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _optional(_codec(next(a for a in arguments if a is not type(None))))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _array(_codec(arguments[0]))
    if origin is tuple:
        return _fixed_array(tuple(_codec(argument) for argument in arguments))
    if origin is Literal:
        return _enumeration(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_codec(arguments[1]))
    assert dataclasses.is_dataclass(kind), kind
    return _message(cast(type, kind))


def _optional(inner: _Codec) -> _Codec:
    return _Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda data, path: None if data is None else inner.decode(data, path),
        {"anyOf": [dict(inner.schema), {"type": "null"}]},
    )


def _array(inner: _Codec) -> _Codec:
    def decode(data: object, path: str) -> tuple[Any, ...]:
        if not isinstance(data, list) or len(data) > MAX_ITEMS:
            raise _fail(path, "a list")
        return tuple(inner.decode(item, f"{path}[{index}]") for index, item in enumerate(data))

    items = {"type": "array", "items": dict(inner.schema)}
    return _Codec(lambda value: [inner.encode(item) for item in value], decode, items)


def _fixed_array(inner: tuple[_Codec, ...]) -> _Codec:
    def decode(data: object, path: str) -> tuple[Any, ...]:
        if not isinstance(data, list) or len(data) != len(inner):
            raise _fail(path, f"a list of {len(inner)}")
        pairs = zip(inner, data, strict=True)
        return tuple(codec.decode(item, f"{path}[{index}]") for index, (codec, item) in enumerate(pairs))

    items = {
        "type": "array",
        "prefixItems": [dict(codec.schema) for codec in inner],
        "minItems": len(inner),
        "maxItems": len(inner),
    }
    return _Codec(lambda v: [c.encode(x) for c, x in zip(inner, v, strict=True)], decode, items)


def _enumeration(allowed: tuple[Any, ...]) -> _Codec:
    def decode(data: object, path: str) -> Any:
        if data not in allowed:
            raise _fail(path, f"one of {', '.join(map(str, allowed))}")
        return data

    return _Codec(_same, decode, {"enum": list(allowed)})


def _mapping(inner: _Codec) -> _Codec:
    def decode(data: object, path: str) -> dict[str, Any]:
        if not isinstance(data, dict) or len(data) > MAX_ITEMS:
            raise _fail(path, "a map")
        return {_text(name, path): inner.decode(item, f"{path}.{name}") for name, item in data.items()}

    values = {"type": "object", "additionalProperties": dict(inner.schema)}
    return _Codec(lambda v: {name: inner.encode(item) for name, item in v.items()}, decode, values)


def _message(kind: type) -> _Codec:
    hints = get_type_hints(kind)
    fields = [(field.name, hints[field.name], _is_required(field)) for field in dataclasses.fields(kind)]

    def encode(value: Any) -> dict[str, Any]:
        return {name: _codec(hint).encode(getattr(value, name)) for name, hint, _ in fields}

    def decode(data: object, path: str) -> Any:
        if not isinstance(data, dict):
            raise _fail(path, "an object")
        found = {
            name: _codec(hint).decode(data.get(name), f"{path}.{name}")
            for name, hint, required in fields
            if required or name in data
        }
        return kind(**found)

    return _Codec(encode, decode, {"$ref": f"#/components/schemas/{kind.__name__}"})
