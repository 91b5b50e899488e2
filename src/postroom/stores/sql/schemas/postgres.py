"""The tables of PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..dialects.postgres import PostgreSQL, lock_number
from ..names import TEMPORARY, Names
from ..schema import Schema
from ..statement import Script

__all__ = ["PostgresSchema"]


class PostgresSchema(Schema):
    """Tables of PostgreSQL; the wanted ones are built as temporary tables, for the server to describe both."""

    version_ddl = """
        CREATE TABLE IF NOT EXISTS {version} (
            version integer PRIMARY KEY,
            applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
        )
        """
    exists = """
        SELECT count(*) FROM pg_class
        WHERE relname = :table::text AND relkind IN ('r', 'p') AND relnamespace = {regnamespace}
        """
    ddl: ClassVar[Sequence[str]] = (
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
        """
        CREATE OR REPLACE VIEW {published} AS
        SELECT seq AS id, created_at, topic, type AS event_type,
               CASE WHEN content_type = 'application/json' THEN convert_from(payload, 'UTF8')::jsonb END AS data,
               headers AS attributes, status = 'delivered' AS published
        FROM {outbox}
        """,
        """
        CREATE OR REPLACE VIEW {messages} AS
        SELECT id, payload, headers AS properties, created_at, delivered_at AS published_at, attempts, last_error,
               updated_at
        FROM {outbox}
        """,
    )

    def __init__(self, dialect: PostgreSQL) -> None:
        super().__init__(dialect)
        schema = dialect.names.schema
        # A name that is not given means the first schema of the search path, as it does for CREATE TABLE.
        named = "current_schema()" if schema is None else f"'{schema}'"
        dialect.identifiers["regnamespace"] = (
            "pg_my_temp_schema()" if schema == TEMPORARY else f"(SELECT oid FROM pg_namespace WHERE nspname = {named})"
        )

    def prepare(self) -> Sequence[str]:
        schema = self.dialect.names.schema
        return () if schema is None else (f'CREATE SCHEMA IF NOT EXISTS "{schema}"',)

    def take_time(self) -> Script[None]:
        yield self.dialect.query("SELECT set_config('statement_timeout', '0', true)")

    def lock(self) -> Script[None]:
        number = lock_number("postroom", "schema", self.dialect.names.table)
        yield self.dialect.query("SELECT pg_advisory_xact_lock(:number::bigint)", number=number)

    def describe(self) -> Script[dict[str, str]]:
        columns = yield self.dialect.query(
            """
            SELECT 'column ' || attname,
                   concat_ws(' ', format_type(atttypid, atttypmod), CASE WHEN attnotnull THEN 'NOT NULL' END,
                             'DEFAULT ' || pg_get_expr(adbin, adrelid), CASE WHEN attidentity <> '' THEN 'IDENTITY' END)
            FROM pg_attribute
            JOIN pg_class ON pg_class.oid = attrelid
            LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
            WHERE relname = :table::text AND relnamespace = {regnamespace} AND attnum > 0 AND NOT attisdropped
            """,
            table=self.dialect.names.table,
        )
        constraints = yield self.dialect.query(
            """
            SELECT 'constraint ' || pg_get_constraintdef(pg_constraint.oid), ''
            FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid
            WHERE relname = :table::text AND relnamespace = {regnamespace} AND contype IN ('c', 'p')
            """,
            table=self.dialect.names.table,
        )
        indexes = yield self.dialect.query(
            """
            SELECT 'index ' || indexed.relname,
                   concat_ws(' ', CASE WHEN indisunique THEN 'UNIQUE' END,
                             split_part(pg_get_indexdef(indexrelid), ' USING ', 2),
                             CASE WHEN NOT indisvalid THEN 'INVALID' END)
            FROM pg_index
            JOIN pg_class AS indexed ON indexed.oid = indexrelid
            JOIN pg_class ON pg_class.oid = indrelid
            WHERE pg_class.relname = :table::text AND pg_class.relnamespace = {regnamespace}
            """,
            table=self.dialect.names.table,
        )
        views = yield self.dialect.query(
            """
            SELECT 'view ' || relname, string_agg(attname, ', ' ORDER BY attnum)
            FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
            WHERE relkind = 'v' AND relnamespace = {regnamespace} AND starts_with(relname, :table::text)
            GROUP BY relname
            """,
            table=self.dialect.names.table,
        )
        return dict(tuple(row) for result in (columns, constraints, indexes, views) for row in result.rows)

    def wanted(self) -> Script[dict[str, str]]:
        model = PostgresSchema(PostgreSQL(Names(table=self.dialect.names.table, schema=TEMPORARY)))
        yield self.dialect.sql("SAVEPOINT postroom_model")
        for text in model.ddl:
            yield model.dialect.sql(text)
        parts = yield from model.describe()
        yield self.dialect.sql("ROLLBACK TO SAVEPOINT postroom_model")
        return parts
