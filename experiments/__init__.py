"""Programs of the papers' studies, and what is made of their results; each one says what it does with `--help`.

- fedmeta_per, fedpac, imaml, mtfl, privacy, quickstart, reptile, robustness, shakespeare: a study of the package each.
- data: tables and figures of the clients of a study.
- figures, fedpac_figures, mtfl_tables, round_costs, published_cohorts: figures and tables from runs of one study each.
- published_samples: FedMeta-Per on CIFAR-10 with the very samples of the published runs.
- reproduce: all runs behind docs/results.md.
- leaderboard: all methods, tuned alike; docs/leaderboard.md.

YAML files here are studies, for `fedjax-meta run`.
"""
