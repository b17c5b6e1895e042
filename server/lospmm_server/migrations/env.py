"""Environment that alembic runs for ``Database.migrate``: the migrations, in the open transaction."""

from alembic import context

from lospmm_server.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
