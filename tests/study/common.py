"""A study that takes seconds, and a watcher that says nothing or stops it."""

from fedjax_meta.study import from_tree

TREE = {
    "title": "Digits by classes",
    "scenarios": {
        "pairs": {
            "dataset": "digits",
            "partition": "classes",
            "options": {"per_client": 3},
            "clients": 10,
            "model": "logistic",
        }
    },
    "systems": {
        "fedavg": {
            "method": "fedavg",
            "options": {"epochs": 1, "batch_size": 20},
            "grid": {"lr": [0.02, 0.2]},
        },
        "local": {"method": "local_only", "options": {"epochs": 1, "batch_size": 20, "lr": 0.1}, "title": "Local only"},
    },
    "rounds": 4,
    "eval_every": 2,
    "seeds": [1, 2],
    "federation": {"cohort_size": 4},
    "tuning": {"rounds": 3, "seeds": [0]},
}


def tree(**changes):
    return {**TREE, **changes}


def study(**changes):
    return from_tree(tree(**changes))


class Silent:
    """Keeps what it is told; raises `KeyboardInterrupt` at a given record."""

    def __init__(self, stop_at=None):
        self.records, self.ended, self.waited, self.stop_at = 0, [], [], stop_at
        self.begun = []  # what, of how many members, after which round

    def begin(self, scenario, system, phase, members, rounds, done, tested):
        self.phase = (scenario, system, phase)
        self.begun.append((self.phase, members, done))

    def progress(self, done, metrics):
        pass

    def record(self, done, records):
        self.records += 1
        if self.records == self.stop_at:
            raise KeyboardInterrupt

    def end(self, outcome):
        self.ended.append(outcome)

    def wait(self, others):
        self.waited += others
