"""SQL databases, SQLite and PostgreSQL."""
