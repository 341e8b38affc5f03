"""The leaderboard of all methods: `python -m experiments.leaderboard --help`."""
