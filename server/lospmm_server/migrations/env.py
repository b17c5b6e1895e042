"""What alembic runs for ``Database.migrate``: the steps, in the transaction that is open already."""

from alembic import context

from lospmm_server.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
