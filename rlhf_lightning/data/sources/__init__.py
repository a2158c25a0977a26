"""Sources of records: files, the hub, and datasets with special formats."""
