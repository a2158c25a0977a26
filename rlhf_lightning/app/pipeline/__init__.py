"""All stages in a row, each judged by its gates."""
