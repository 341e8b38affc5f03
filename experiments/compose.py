"""Any system from its parts: an algorithm of the registry, a meta-gradient, what is personal, and the optimisers of both ends.

`python -m experiments.compose --help` lists the parts and shows compositions that no paper reports.
"""

import ast
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import optax
import typer

import fedjax_meta as fm
from experiments import _runner as runner
from fedjax_meta import checkpoint, checks, implicit, meta, models, report
from fedjax_meta.data import protocols, sources

ESTIMATORS: dict[str, Callable[..., meta.Estimator]] = {
    "exact": meta.exact,
    "first_order": meta.first_order,
    "hessian_free": meta.hessian_free,
    "implicit": implicit.implicit,
    "reptile": meta.reptile,
}
# What an estimator cannot do without, where the user says nothing.
NEEDED: dict[str, dict[str, Any]] = {"implicit": {"prox_weight": 2.0}}

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "yogi": optax.yogi,
    "adagrad": optax.adagrad,
}
PROTOCOLS: dict[str, Callable[..., protocols.Protocol]] = {
    "fedmeta_per": protocols.fedmeta_per,
    "fedpac": protocols.fedpac,
    "reptile": protocols.reptile,
    "mtfl": protocols.mtfl,
}


def assignments(words: Sequence[str], name: str) -> dict[str, Any]:
    """Options written `key=value`; a value is a Python literal where it reads as one, and text otherwise.

    Raises:
      ValueError: a word without `=`, or a key twice.

    Example:
      >>> assignments(["inner_lr=0.1", "adapts=head", "batch_size=None"], "--set")
      {'inner_lr': 0.1, 'adapts': 'head', 'batch_size': None}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (equals and key.isidentifier()) or key in found:
            raise ValueError(f"{name} {word!r} must read key=value, and no key may come twice")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def compose(
    task: fm.Task,
    algorithm: str,
    *,
    estimator: str | None = None,
    estimator_options: Mapping[str, Any] | None = None,
    outer_optimizer: str | None = None,
    server_optimizer: str | None = None,
    **options: Any,
) -> fm.Algorithm:
    """An algorithm of the registry with its parts given by name.

    Args:
      task: what is learned.
      algorithm: name in `fedjax_meta.ALGORITHMS`.
      estimator: name in `ESTIMATORS`, with `estimator_options`.
      outer_optimizer: name in `OPTIMIZERS`, of the clients' meta-updates.
      server_optimizer: name in `OPTIMIZERS` and a rate, "adam:0.01".
      **options: of the algorithm.

    Raises:
      ValueError: an unknown name, an option that the algorithm or the estimator does not take, and what they refuse.
    """
    checks.one_of("--algorithm", algorithm, fm.ALGORITHMS)
    if estimator is not None:
        checks.one_of("--estimator", estimator, ESTIMATORS)
        chosen = {**NEEDED.get(estimator, {}), **(estimator_options or {})}
        _check_options(f"the estimator {estimator}", ESTIMATORS[estimator], chosen)
        options["estimator"] = functools.partial(ESTIMATORS[estimator], **chosen)
    elif estimator_options:
        raise ValueError("--estimator-set needs --estimator")
    if outer_optimizer is not None:
        checks.one_of("--outer-optimizer", outer_optimizer, OPTIMIZERS)
        options["outer_optimizer"] = OPTIMIZERS[outer_optimizer]
    if server_optimizer is not None:
        name, _, rate = server_optimizer.partition(":")
        checks.one_of("--server-optimizer", name, OPTIMIZERS)
        (rate_value,) = runner.numbers(rate or "1.0", "--server-optimizer", float)
        options["server_optimizer"] = OPTIMIZERS[name](rate_value)
    try:
        return fm.ALGORITHMS[algorithm](task, **options)
    except TypeError as error:
        # Builders hand what they do not know to the next one, so only the last knows that nobody takes it.
        unknown = [key for key in options if f"'{key}'" in str(error)]
        if not unknown:
            raise
        raise ValueError(f"{algorithm} takes no option {unknown[0]!r}") from None


def _check_options(what: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    allowed = [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for key in options:
        if key not in allowed:
            raise ValueError(f"{what} takes no option {key!r}; it takes {', '.join(allowed)}")


def model(name: str | None, data: fm.FederatedData) -> fm.Task:
    """A model of `models.MODELS` for the shape of the data; by default the LeNet for colour images and else the perceptron."""
    shape = data.x.shape[1:]
    color = len(shape) == 3 and shape[-1] == 3
    name = ("lenet" if color else "mlp") if name is None else name
    checks.one_of("--model", name, models.MODELS)
    takes = inspect.signature(models.MODELS[name]).parameters
    if "inputs" in takes:
        return models.MODELS[name](inputs=math.prod(shape), classes=data.num_classes)
    return models.MODELS[name](image=shape if len(shape) == 3 else (*shape, 1), classes=data.num_classes)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(
    algorithm: Annotated[str, typer.Option(help="Of the registry: " + ", ".join(fm.ALGORITHMS) + ".")] = "fedmeta_maml",
    estimator: Annotated[
        str | None, typer.Option(help="Meta-gradient: " + ", ".join(ESTIMATORS) + ".", show_default=False)
    ] = None,
    estimator_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the meta-gradient, e.g. cg_steps=10; may be repeated."),
    ] = None,
    personal: Annotated[
        str | None, typer.Option(help="Leaves that stay with their client: " + fm.masks.ALLOWED + ".", show_default=False)
    ] = None,
    personal_rates: Annotated[
        str | None, typer.Option(help="Learned inner rates that stay; needs --learned-rates.", show_default=False)
    ] = None,
    learned_rates: Annotated[bool, typer.Option("--learned-rates", help="Learn the inner rates (Meta-SGD).")] = False,
    adapts: Annotated[str | None, typer.Option(help="Leaves that adaptation moves (head: ANIL).", show_default=False)] = None,
    outer_optimizer: Annotated[
        str | None, typer.Option(help="Of the clients' meta-updates: " + ", ".join(OPTIMIZERS) + ".", show_default=False)
    ] = None,
    server_optimizer: Annotated[
        str | None, typer.Option(metavar="NAME:RATE", help="Of the server, e.g. adam:0.01.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other option of the algorithm, e.g. inner_lr=0.01; may be repeated."
        ),
    ] = None,
    compare: Annotated[str, typer.Option(help="Algorithms of the registry to run beside it, with commas between.")] = "",
    dataset: Annotated[
        str, typer.Option(help="`mnist_small`, `digits`, an .npz, or a set of tensorflow-datasets.")
    ] = "mnist_small",
    protocol: Annotated[str, typer.Option(help="Who holds what: " + ", ".join(PROTOCOLS) + ".")] = "fedmeta_per",
    clients: Annotated[
        int | None, typer.Option(min=1, help="Clients; the protocol's own when not given.", show_default=False)
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--model", help=", ".join(models.MODELS) + "; mlp, for colour lenet, when not given.", show_default=False
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 40,
    eval_every: Annotated[int, typer.Option(min=1, help="Rounds between evaluations; the first and the last are added.")] = 20,
    clients_per_round: Annotated[int, typer.Option(min=1)] = 5,
    seeds: Annotated[str, typer.Option(help="Seeds of training, e.g. 1,2,3.")] = "1",
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where what clients keep waits, for more of them than a device holds: `memory` (the host's) or a folder; the "
            "device when not given.",
            show_default=False,
        ),
    ] = None,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    debug: runner.DebugOption = False,
) -> None:
    """Runs one composition, and those it is compared with, on any data set; prints a table and writes a report with a figure.

    Local clients are tested on samples that they kept back; where the protocol has new clients, these are tested too.

    Compositions that no source paper reports:

    `--algorithm fedmeta_per_maml --estimator implicit --set batch_size=None` (FedMeta-Per x iMAML; also `first_order`,
    `reptile`, `hessian_free`)

    `--algorithm fedmeta_maml --personal head+bn_affine --model mtfl_mlp` (private batch norms beside the private head)

    `--algorithm fedmeta_maml --learned-rates --personal-rates all` (private rates, shared model), or `--personal head
    --personal-rates none` (shared rates, private head)

    `--algorithm fedmeta_per_maml --server-optimizer adam:0.001`

    `--algorithm reptile --personal bn --model mtfl_mlp --set weighting=samples --server-optimizer momentum:0.1`
    """
    with runner.one_line_errors(debug):
        checks.one_of("--protocol", protocol, PROTOCOLS)
        chosen: dict[str, dict[str, Any]] = {
            "composition": {
                "algorithm": algorithm,
                "estimator": estimator,
                "estimator_options": assignments(estimator_set or (), "--estimator-set"),
                "outer_optimizer": outer_optimizer,
                "server_optimizer": server_optimizer,
                **assignments(set_ or (), "--set"),
            }
        }
        named = {"personal": personal, "personal_rates": personal_rates, "adapts": adapts}
        named |= {"learned_rates": True} if learned_rates else {}
        for key, value in named.items():
            if value is not None:
                chosen["composition"][key] = value
        for name in filter(None, (name.strip() for name in compare.split(","))):
            chosen[name] = {"algorithm": name}
        seed_list = runner.numbers(seeds, "--seeds")
        shared = runner.prepare(devices, compile_cache, cohort_size=clients_per_round)
        with runner.console.status(f"loading {dataset}"):
            source = sources.load(dataset, data_dir=data_dir)
            more = {} if clients is None else {"num_clients": clients}
            data = PROTOCOLS[protocol](source, seed=data_seed, **more)
        task = model(network, data.train)
        common = {"cohort_size": clients_per_round, "devices": shared}
        config = {"experiment": "compose", "dataset": dataset, "protocol": protocol, "data_seed": data_seed, "model": network}
        plans = []
        for name, parts in chosen.items():
            built = compose(task, **{**common, **parts})
            title = _title(parts)
            tests = {
                f"{name}/local": runner.Test(title, "local", runner.evaluator(built, data.train, devices=shared)),
            }
            if data.new is not None:
                new = runner.evaluator(built, data.new, devices=shared, support="support", query="query", known=False)
                tests[f"{name}/new"] = runner.Test(title, "new", new)
            plans += [
                runner.Plan(
                    name=f"{name}_seed{seed}",
                    title=title,
                    algorithm=built,
                    data=data.train,
                    tests=tests,
                    rounds=rounds,
                    eval_every=eval_every,
                    seed=seed,
                    config={**config, "parts": parts, "rounds": rounds, "eval_every": eval_every, "seed": seed, **common},
                    store=store,
                )
                for seed in seed_list
            ]
        folder = runner.open_folder(out, f"compose-{algorithm}", resume=resume, options={**config, "systems": chosen})
        results = runner.run_all(plans, folder, resume=resume)
        title = f"{data.name}: round {rounds}"
        headings = ("system", "clients", "accuracy", "mean ± std over clients", "macro F1")
        series = runner.all_series(plans, results)
        rows = []
        for key in dict.fromkeys((one.title, one.clients) for one in series):
            runs = [one for one in series if (one.title, one.clients) == key]
            scores = report.over_seeds(runs)
            spread = f"{scores['accuracy_mean'][0]:.2f} ±{scores['accuracy_std'][0]:.2f}"
            rows.append([*key, report.with_spread(scores["accuracy"], len(runs)), spread, f"{scores['f1_mean'][0]:.2f}"])
        runner.console.print(report.rich_table(f"{title} (percent)", headings, rows, text_columns=2))
        report.save_figure(folder / "figure.png", series, title=title)
        lines = [f"# {title}", "", report.markdown_table(headings, rows, text_columns=2), "", "![](figure.png)", ""]
        checkpoint.write_text(folder / "report.md", "\n".join([*lines, f"    {runner.command_line(folder)}", ""]))
        runner.console.print(f"\nreport, figure, metrics and states: {folder}", soft_wrap=True)


def _title(parts: Mapping[str, Any]) -> str:
    """The algorithm and what was changed about it."""
    changed = []
    for key, value in parts.items():
        if key == "algorithm" or value is None or value == {}:
            continue
        inner = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else f"{key}={value}"
        changed.append(inner)
    return parts["algorithm"] + (f" ({', '.join(changed)})" if changed else "")


if __name__ == "__main__":
    app()
