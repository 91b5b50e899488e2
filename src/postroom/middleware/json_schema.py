"""Middleware that checks payloads against a JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..decoding import plain
from ..errors import ConfigurationError, DecodeError, MissingExtraError
from ..message import Message
from .chain import Next

try:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Resource
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import EMPTY_REGISTRY, specification_with
except ImportError as _error:
    raise MissingExtraError("jsonschema", "jsonschema") from _error

__all__ = ["JSONSchemaMiddleware"]


class JSONSchemaMiddleware:
    """Fails messages whose payload breaks the JSON Schema of their type with `DecodeError`; types without one pass.

    Such a message is redelivered like one that cannot be decoded: the next version of schema or sender may be right.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set up.

        Args:
            schemas: A JSON Schema for each type of message; references are followed within it only, never fetched.

        Raises:
            ConfigurationError: A schema is not one itself, or refers to something that is not in it.
        """
        self._validators: dict[str, Any] = {}
        for kind, schema in schemas.items():
            validator = validator_for(schema)
            try:
                validator.check_schema(dict(schema))
            except SchemaError as error:
                raise ConfigurationError(f"the schema of {kind!r} is not valid: {error.message}") from error
            _check_references(kind, schema, validator)
            self._validators[kind] = validator(schema, registry=EMPTY_REGISTRY)

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message whose payload is valid."""
        validator = self._validators.get(message.type)
        if validator is not None:
            try:
                value = plain(message.payload)
            except DecodeError:
                raise DecodeError(f"the payload of {message.type!r} is not JSON") from None
            try:
                error = next(iter(validator.iter_errors(value)), None)
            except (RecursionError, ArithmeticError):
                # It would fail each time; and what the validator says of it shows the payload.
                raise DecodeError(
                    f"the payload of {message.type!r} is nested too deeply, or has numbers too large, to be checked"
                ) from None
            if error is not None:
                # The place in the schema: one in the payload would name its keys, and those are data too.
                rule = "/".join(str(step) for step in error.absolute_schema_path)
                raise DecodeError(f"the payload of {message.type!r} breaks the rule #/{rule} of its schema")
        return await call_next(message)


def _check_references(kind: str, schema: Mapping[str, Any], validator: Any) -> None:  # noqa: ANN401
    """Follow the references of a schema once, so that no message is the first to."""
    specification = specification_with(validator.META_SCHEMA["$schema"])
    root: Resource[Any] = specification.create_resource(schema)
    waiting = [(root, EMPTY_REGISTRY.with_resource(root.id() or "", root).resolver(root.id() or ""))]
    while waiting:
        resource, resolver = waiting.pop()
        # A schema may be just true or false.
        content = cast("Mapping[str, object]", resource.contents if isinstance(resource.contents, Mapping) else {})
        for reference in (content.get("$ref"), content.get("$dynamicRef")):
            try:
                if isinstance(reference, str):
                    resolver.lookup(reference)
            except Unresolvable:
                raise ConfigurationError(
                    f"the schema of {kind!r} refers to {reference!r}, which is not in it; put it under $defs"
                ) from None
        waiting += [(part, resolver.in_subresource(part)) for part in resource.subresources()]
