"""Migrations of the tables, step by step (alembic); ``Database.migrate`` runs them."""
