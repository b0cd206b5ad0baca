"""The tasks that tenants learn: how their data are read and divided, their losses and their scores."""
