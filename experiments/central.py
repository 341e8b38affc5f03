"""The scenarios of a study with all training samples in one place: what federated systems give up.

python -m experiments.central STUDY.yaml. The model of each scenario is trained by SGD on the samples of the known clients
together, for as many passes as a client makes on average in the study's rounds, and tested on each client's own samples. Its rate
is chosen on training samples that are held back.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import fedjax_meta as fm
from fedjax_meta import study as studies
from fedjax_meta.data import FederatedData, pooled
from fedjax_meta.study.scenario import Clients


def _trained(task: fm.Task, data: FederatedData, rate: float, batch: int, passes: int, seed: int) -> tuple[fm.Algorithm, Any]:
    algorithm = fm.federate(fm.fedavg(task, lr=rate, batch_size=batch), fm.Federation(cohort_size=1))
    state, _ = fm.simulate(algorithm, pooled(data), key=jax.random.key(seed), rounds=passes, eval_every=passes)
    return algorithm, state


def _score(algorithm: fm.Algorithm, state: Any, data: FederatedData, support: str, query: str) -> dict[str, float]:
    found = fm.evaluate(algorithm, jax.random.key(7), state, data, known=False, support=support, query=query)
    return found.summary()


def central(clients: Clients, *, rates: tuple[float, ...], batch: int, passes: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The rate, and the scores of each seed on known and on new clients."""
    train, tuning = (jax.tree.map(jnp.asarray, data) for data in (clients.train, clients.tuning))
    trials = {}
    for rate in rates:
        algorithm, state = _trained(clients.task, tuning, rate, batch, passes, 100)
        trials[rate] = _score(algorithm, state, tuning, "train", "test")["accuracy_mean"]
    best = max(trials, key=lambda rate: np.nan_to_num(trials[rate]))
    scores: dict[str, list[dict[str, float]]] = {"known": [], "new": []}
    for seed in seeds:
        algorithm, state = _trained(clients.task, train, best, batch, passes, seed)
        scores["known"].append(_score(algorithm, state, train, "train", "test"))
        if clients.new is not None:
            new = jax.tree.map(jnp.asarray, clients.new)
            scores["new"].append(_score(algorithm, state, new, "support", "query"))
    return {"rate": best, "tuning": {str(rate): score for rate, score in trials.items()}, **scores}


def main(
    study: Annotated[Path, typer.Argument(help="A study of scenarios with class labels.")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/central"),
    data_dir: Annotated[str | None, typer.Option()] = None,
    batch: Annotated[int, typer.Option(min=1)] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="Local passes of a round in the study.")] = 1,
) -> None:
    """Trains centrally and prints percent of samples, mean over clients and seeds.

    \b
    Examples:
      python -m experiments.central quickstart --out runs/central
      python -m experiments.central uci_har --data-dir DATA --epochs 1
    """
    try:
        given = studies.load(study)
        out.mkdir(parents=True, exist_ok=True)
        for name, scenario in given.scenarios.items():
            path = out / f"{name}.json"
            if not path.exists():
                clients = scenario.build(data_dir)
                cohort = given.federation.get("cohort_size", clients.train.num_clients)
                passes = max(round(given.rounds * epochs * cohort / clients.train.num_clients), 1)
                result = central(clients, rates=(0.03, 0.1, 0.3), batch=batch, passes=passes, seeds=tuple(given.seeds))
                path.write_text(json.dumps({"title": clients.title, "passes": passes, **result}, indent=1) + "\n")
            result = json.loads(path.read_text())
            typer.echo(f"{result['title']}: SGD {result['rate']:g}, {result['passes']} passes")
            for which in ("known", "new"):
                values = [100 * row["accuracy_mean"] for row in result[which]]
                if values:
                    typer.echo(f"  {which} clients: {np.mean(values):.2f} ± {np.std(values, ddof=int(len(values) > 1)):.2f} %")
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
