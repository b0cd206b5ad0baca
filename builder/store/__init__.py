"""What has been built, before any of it is exported: the store, and files that survive a cut."""
