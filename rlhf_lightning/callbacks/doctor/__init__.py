"""The doctor: watches PPO, raises alerts and, if asked, intervenes."""
