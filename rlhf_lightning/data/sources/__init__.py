"""Sources of records: files, the hub, and data sets with a form of their own."""
