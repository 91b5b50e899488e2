"""The tables of PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar, Final

from ..dialects.postgres import PostgreSQL, lock_number
from ..names import TEMPORARY
from ..schema import Change, Group, Schema
from ..statement import Row, Script

__all__ = ["PostgresSchema"]

#: How the description of an index ends whose creation failed or is not over yet.
_INVALID: Final = "INVALID"
#: What of the DDL can be built while others write.
_INDEX: Final = re.compile(r"(?P<create>CREATE (UNIQUE )?INDEX) IF NOT EXISTS \{(?P<name>\w+)\} ON")
_PARKED: Final = """{parked} ON {outbox} (namespace, destination, next_attempt_at, seq)
        WHERE status = 'pending' AND parked = token
        """
# A cast that fails would fail the whole query, and before version 16 SQL cannot ask first whether text is JSON. A role
# that may read the view must be allowed to call the function, even where that is not the default.
_JSON: Final = (
    """
        CREATE OR REPLACE FUNCTION {json}(payload bytea) RETURNS jsonb
        LANGUAGE plpgsql IMMUTABLE STRICT AS $$
        BEGIN
            RETURN pg_catalog.convert_from(payload, 'UTF8')::pg_catalog.jsonb;
        EXCEPTION WHEN data_exception OR program_limit_exceeded THEN
            RETURN NULL;
        END
        $$
        """,
    "GRANT EXECUTE ON FUNCTION {json}(bytea) TO PUBLIC",
)
_PUBLISHED: Final = """
        CREATE OR REPLACE VIEW {published} AS
        SELECT seq AS id, created_at, topic, type AS event_type,
               CASE WHEN content_type = 'application/json' THEN {json}(payload) END AS data,
               headers AS attributes, status = 'delivered' AS published
        FROM {outbox}
        """


class PostgresSchema(Schema):
    """Tables of PostgreSQL; the wanted ones are built as temporary tables, for the server to describe both."""

    version: ClassVar[str] = """
        CREATE TABLE IF NOT EXISTS {version} (
            version integer PRIMARY KEY,
            applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            step integer
        )
        """
    exists = """
        SELECT count(*) FROM pg_class
        WHERE relname = :table::text AND relkind IN ('r', 'p') AND relnamespace = {regnamespace}
        """
    outbox: ClassVar[Sequence[str]] = (
        """
        CREATE TABLE IF NOT EXISTS {outbox} (
            id uuid PRIMARY KEY,
            seq bigint NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 1),
            namespace text NOT NULL,
            topic text NOT NULL,
            type text NOT NULL,
            {key} text,
            tenant_id uuid,
            dedupe_key text,
            payload bytea NOT NULL,
            content_type text NOT NULL,
            headers jsonb NOT NULL DEFAULT '{}',
            status text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'processing', 'delivered', 'dead')),
            attempts integer NOT NULL DEFAULT 0,
            token bigint NOT NULL DEFAULT 0,
            next_attempt_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            locked_by uuid,
            locked_until timestamptz,
            last_error text,
            created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            delivered_at timestamptz,
            destination text,
            parked bigint,
            CHECK ((status = 'processing') = (locked_by IS NOT NULL)),
            CHECK ((locked_by IS NULL) = (locked_until IS NULL))
        ) WITH (
            autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
            autovacuum_analyze_scale_factor = 0.05
        )
        """,
        """
        CREATE UNIQUE INDEX IF NOT EXISTS {dedupe} ON {outbox} (namespace, topic, dedupe_key)
        WHERE dedupe_key IS NOT NULL
        """,
        """
        CREATE INDEX IF NOT EXISTS {ready} ON {outbox} (namespace, next_attempt_at, seq)
        WHERE status = 'pending' AND {key} IS NULL
        """,
        """
        CREATE INDEX IF NOT EXISTS {ready_keyed} ON {outbox} (namespace, next_attempt_at, seq)
        WHERE status = 'pending' AND {key} IS NOT NULL
        """,
        """
        CREATE INDEX IF NOT EXISTS {leased} ON {outbox} (namespace, locked_until, seq)
        WHERE status = 'processing'
        """,
        """
        CREATE INDEX IF NOT EXISTS {keyed} ON {outbox} (namespace, topic, {key}, seq)
        WHERE {key} IS NOT NULL AND status IN ('pending', 'processing')
        """,
        """
        CREATE INDEX IF NOT EXISTS {dead} ON {outbox} (namespace, topic, {key}, seq)
        WHERE status = 'dead'
        """,
        """
        CREATE INDEX IF NOT EXISTS {delivered} ON {outbox} (namespace, delivered_at)
        WHERE status = 'delivered'
        """,
        f"CREATE INDEX IF NOT EXISTS {_PARKED}",
        *_JSON,
        _PUBLISHED,
        """
        CREATE OR REPLACE VIEW {messages} AS
        SELECT id, payload, headers AS properties, created_at, delivered_at AS published_at, attempts, last_error,
               updated_at
        FROM {outbox}
        """,
    )

    inbox: ClassVar[Sequence[str]] = (
        """
        CREATE TABLE IF NOT EXISTS {inbox} (
            consumer text NOT NULL,
            tenant_id uuid NOT NULL,
            message_id uuid NOT NULL,
            created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            PRIMARY KEY (consumer, tenant_id, message_id)
        ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)
        """,
        "CREATE INDEX IF NOT EXISTS {inbox_old} ON {inbox} (consumer, created_at)",
        """
        CREATE TABLE IF NOT EXISTS {inbox_dead} (
            consumer text NOT NULL,
            tenant_id uuid NOT NULL,
            message_id uuid NOT NULL,
            topic text NOT NULL,
            type text NOT NULL,
            {key} text,
            namespace text NOT NULL,
            payload bytea NOT NULL,
            content_type text NOT NULL,
            headers jsonb NOT NULL DEFAULT '{}',
            attempts integer NOT NULL,
            error text NOT NULL,
            died_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            PRIMARY KEY (consumer, tenant_id, message_id)
        )
        """,
        """
        CREATE OR REPLACE VIEW {inbox_processed} AS
        SELECT consumer AS subscriber, message_id, created_at
        FROM {inbox}
        """,
    )

    tickets: ClassVar[Sequence[str]] = (
        """
        CREATE TABLE IF NOT EXISTS {tickets} (
            namespace text NOT NULL,
            ticket text NOT NULL,
            expires_at timestamptz NOT NULL,
            status text NOT NULL CHECK (status IN ('scheduled', 'expired', 'revoked')),
            ended_at timestamptz,
            PRIMARY KEY (namespace, ticket),
            CHECK ((status = 'scheduled') = (ended_at IS NULL))
        ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)
        """,
        """
        CREATE INDEX IF NOT EXISTS {tickets_due} ON {tickets} (namespace, expires_at, ticket)
        WHERE status = 'scheduled'
        """,
        """
        CREATE INDEX IF NOT EXISTS {tickets_ended} ON {tickets} (namespace, ended_at)
        WHERE ended_at IS NOT NULL
        """,
    )
    ddl: ClassVar[Mapping[Group, Sequence[str]]] = {
        "outbox": outbox,
        "inbox": inbox,
        "tickets": tickets,
        "version": (version,),
    }
    steps: ClassVar[Sequence[Sequence[Change]]] = (
        (
            Change(
                group="version",
                part="column {table}_version.step",
                texts=("ALTER TABLE {version} ADD COLUMN IF NOT EXISTS step integer",),
            ),
            Change(
                part="column destination", texts=("ALTER TABLE {outbox} ADD COLUMN IF NOT EXISTS destination text",)
            ),
            Change(part="column parked", texts=("ALTER TABLE {outbox} ADD COLUMN IF NOT EXISTS parked bigint",)),
            Change(
                part="index {table}_parked",
                texts=(f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {_PARKED}",),
                undo="DROP INDEX CONCURRENTLY IF EXISTS {prefix}{parked}",
                is_atomic=False,
            ),
            Change(part="function {table}_json", texts=_JSON, replaces=True),
            Change(part="view {table}_published", texts=(_PUBLISHED,), replaces=True),
        ),
    )

    def __init__(self, dialect: PostgreSQL) -> None:
        super().__init__(dialect)
        schema = dialect.names.schema
        # A name that is not given means the first schema of the search path, as it does for CREATE TABLE.
        named = "current_schema()" if schema is None else f"'{schema}'"
        dialect.identifiers["regnamespace"] = (
            "pg_my_temp_schema()" if schema == TEMPORARY else f"(SELECT oid FROM pg_namespace WHERE nspname = {named})"
        )
        dialect.identifiers["prefix"] = "" if schema is None else f'"{schema}".'

    def prepare(self) -> Sequence[str]:
        schema = self.dialect.names.schema
        return () if schema is None else (f'CREATE SCHEMA IF NOT EXISTS "{schema}"',)

    def repairs(self, group: Group) -> Sequence[Change]:
        """Build indexes that are gone without locking their tables, as `mend` would."""
        found = ((text, _INDEX.search(text)) for text in self.ddl[group])
        return [self._repair(group, text, match) for text, match in found if match is not None]

    def _repair(self, group: Group, text: str, match: re.Match[str]) -> Change:
        name = match["name"]
        identifier = self.dialect.identifiers[name].strip('"')
        return Change(
            group=group,
            part=f"index {identifier}",
            texts=(text.replace(match["create"], f"{match['create']} CONCURRENTLY", 1),),
            undo=f"DROP INDEX CONCURRENTLY IF EXISTS {{prefix}}{{{name}}}",
            is_atomic=False,
        )

    def take_time(self) -> Script[None]:
        yield self.dialect.query("SELECT set_config('statement_timeout', '0', true)")

    def lock(self) -> Script[None]:
        names = self.dialect.names
        # Two outboxes may share an inbox, so that has a lock of its own; everybody takes it last.
        for kind, table in (("schema", names.table), ("inbox", names.inbox)):
            number = lock_number("postroom", kind, table)
            yield self.dialect.query("SELECT pg_advisory_xact_lock(:number::bigint)", number=number)

    def limit_waits(self, longest: timedelta) -> Script[None]:
        milliseconds = max(longest // timedelta(milliseconds=1), 1)
        yield self.dialect.query("SELECT set_config('lock_timeout', :wait::text, true)", wait=str(milliseconds))

    def build(self, change: Change) -> Script[None]:
        """Create an index while others write; what an earlier attempt left behind half-made is dropped first."""
        limit = yield self.dialect.query("SELECT current_setting('statement_timeout')")
        number = lock_number("postroom", "build", self.dialect.names.table)
        yield from self._set_limit("0", unless=limit.rows[0][0])
        yield from self._lock_builds(number)
        try:
            found = yield from self.describe(change.group)
            definition = found.get(self.part(change))
            if definition is not None and definition.endswith(_INVALID):
                yield self.dialect.sql(change.undo)
            if definition is None or definition.endswith(_INVALID):
                yield from self.execute(change)
        finally:
            yield self.dialect.query("SELECT pg_advisory_unlock(:number::bigint)", number=number)
            yield from self._set_limit(limit.rows[0][0], unless="0")

    def _set_limit(self, limit: str, *, unless: str) -> Script[None]:
        # SET LOCAL ends with a transaction, in which no index can be built concurrently.
        if limit != unless:
            yield self.dialect.query("SELECT set_config('statement_timeout', :limit::text, false)", limit=limit)

    def _lock_builds(self, number: int) -> Script[None]:
        # A statement that waits for the lock would keep its snapshot, and the build waits for every older snapshot.
        while True:
            taken = yield self.dialect.query("SELECT pg_try_advisory_lock(:number::bigint)", number=number)
            if taken.rows[0][0]:
                return
            yield self.dialect.query("SELECT pg_sleep(0.2)")

    def describe(self, group: Group) -> Script[dict[str, str]]:
        rows: list[Row] = []
        for table, prefix in self.tables(group).items():
            rows += yield from self._describe(table, prefix)
        names = self.dialect.names
        views = {
            "outbox": [f"{names.table}_published", f"{names.table}_messages"],
            "inbox": [f"{names.inbox}_processed"],
        }.get(group, [])
        shown = yield self.dialect.query(
            """
            SELECT 'view ' || relname, string_agg(attname, ', ' ORDER BY attnum)
                   || CASE WHEN strpos(pg_get_viewdef(pg_class.oid), :guard::text) > 0 THEN ' by ' || :guard ELSE '' END
            FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
            WHERE relkind = 'v' AND relnamespace = {regnamespace} AND relname = ANY (:views::text[])
            GROUP BY pg_class.oid, relname
            UNION ALL
            SELECT 'function ' || proname, btrim(regexp_replace(prosrc, '\\s+', ' ', 'g'))
            FROM pg_proc
            WHERE pronamespace = {regnamespace} AND proname = :guard AND :is_outbox::boolean
            """,
            views=views,
            guard=f"{names.table}_json",
            is_outbox=group == "outbox",
        )
        return dict(tuple(row) for row in (*rows, *shown.rows))

    def _describe(self, table: str, prefix: str) -> Script[Sequence[Row]]:
        """Return the columns, constraints and indexes of a table."""
        columns = yield self.dialect.query(
            """
            SELECT 'column ' || :prefix::text || attname,
                   concat_ws(' ', format_type(atttypid, atttypmod), CASE WHEN attnotnull THEN 'NOT NULL' END,
                             'DEFAULT ' || pg_get_expr(adbin, adrelid), CASE WHEN attidentity <> '' THEN 'IDENTITY' END)
            FROM pg_attribute
            JOIN pg_class ON pg_class.oid = attrelid
            LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
            WHERE relname = :table::text AND relnamespace = {regnamespace} AND attnum > 0 AND NOT attisdropped
            """,
            table=table,
            prefix=prefix,
        )
        constraints = yield self.dialect.query(
            """
            SELECT 'constraint ' || pg_get_constraintdef(pg_constraint.oid) || :suffix::text, ''
            FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid
            WHERE relname = :table::text AND relnamespace = {regnamespace} AND contype IN ('c', 'p')
            """,
            table=table,
            suffix=prefix and f" of {table}",
        )
        indexes = yield self.dialect.query(
            """
            SELECT 'index ' || indexed.relname,
                   concat_ws(' ', CASE WHEN indisunique THEN 'UNIQUE' END,
                             split_part(pg_get_indexdef(indexrelid), ' USING ', 2),
                             CASE WHEN NOT indisvalid THEN :invalid::text END)
            FROM pg_index
            JOIN pg_class AS indexed ON indexed.oid = indexrelid
            JOIN pg_class ON pg_class.oid = indrelid
            WHERE pg_class.relname = :table::text AND pg_class.relnamespace = {regnamespace}
            """,
            table=table,
            invalid=_INVALID,
        )
        return [*columns.rows, *constraints.rows, *indexes.rows]

    def wanted(self, group: Group) -> Script[dict[str, str]]:
        model = PostgresSchema(PostgreSQL(replace(self.dialect.names, schema=TEMPORARY)))
        yield self.dialect.sql("SAVEPOINT postroom_model")
        for text in model.ddl[group]:
            yield model.dialect.sql(text)
        parts = yield from model.describe(group)
        yield self.dialect.sql("ROLLBACK TO SAVEPOINT postroom_model")
        return parts
