"""Middleware that checks payloads against a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError, MissingExtraError, RejectError
from ..message import Message
from .chain import Next

try:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing.jsonschema import EMPTY_REGISTRY
except ImportError as _error:
    raise MissingExtraError("jsonschema", "jsonschema") from _error

__all__ = ["JSONSchemaMiddleware"]


class JSONSchemaMiddleware:
    """Rejects messages whose payload is not what the schema of their type says; types without one pass."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set up.

        Args:
            schemas: A JSON Schema for each type of message; references are followed within it only, never fetched.

        Raises:
            ConfigurationError: A schema is not one itself.
        """
        self._validators: dict[str, Any] = {}
        for kind, schema in schemas.items():
            validator = validator_for(schema)
            try:
                validator.check_schema(dict(schema))
            except SchemaError as error:
                raise ConfigurationError(f"the schema of {kind!r} is not valid: {error.message}") from error
            self._validators[kind] = validator(schema, registry=EMPTY_REGISTRY)

    async def __call__(self, message: Message, call_next: Next) -> Sequence[Message]:
        """Handle a message whose payload is valid."""
        validator = self._validators.get(message.type)
        if validator is not None:
            try:
                value = json.loads(message.payload)
            except (ValueError, RecursionError):
                raise RejectError(f"the payload of {message.type!r} is not JSON") from None
            error = next(iter(validator.iter_errors(value)), None)
            if error is not None:
                # The place in the schema: one in the payload would name its keys, and those are data too.
                rule = "/".join(str(step) for step in error.absolute_schema_path)
                raise RejectError(f"the payload of {message.type!r} breaks the rule #/{rule} of its schema")
        return await call_next(message)
