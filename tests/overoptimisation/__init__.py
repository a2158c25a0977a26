"""Gold against proxy reward as a policy moves away from the one it started from."""
