"""The doctor: watches PPO for illnesses, tells of them and, if asked, treats them."""
