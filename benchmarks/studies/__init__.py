"""Studies that the docs quote: sick runs, over-optimisation, rounds, endurance."""
