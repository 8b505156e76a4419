"""Run by Alembic: migrate over the connection that ``autoshard.api.store.migrate`` hands in.

That connection is inside a transaction already, which holds the lock and all the migrations.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
