"""Runs that start from each other: a study is a matrix of them, a pipeline a chain with gates."""
