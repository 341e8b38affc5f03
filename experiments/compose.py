"""Any system from its parts: a method, a meta-gradient, what is personal, optimisers, and the federation.

`python -m experiments.compose --help` lists the parts and shows compositions that no paper reports.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

import jax
import numpy as np
import typer

import fedjax_meta as fm
from experiments import _runner as runner
from experiments._parts import AGGREGATORS, ATTACKS, PARTICIPATION, SCHEDULES, assignments, part, rated
from experiments._parts import aggregator as aggregator_of
from experiments._parts import clip as clip_of
from fedjax_meta import checkpoint, checks, escape, models, report
from fedjax_meta.data.registry import PAPERS, PARTITIONS
from fedjax_meta.study import baselines
from fedjax_meta.study.scenario import Clients, Scenario
from fedjax_meta.study.system import ESTIMATORS, OPTIMIZERS

NEEDED: dict[str, dict[str, Any]] = {"implicit": {"prox_weight": 2.0}}
"""Options that an estimator needs, with the values that they have when the user gives none."""

UPLOADS: dict[str, Callable[[Any], fm.uploads.UploadTransform]] = {
    "sparsify": fm.uploads.sparsify,
    "quantize": fm.uploads.quantize,
    "clip": lambda text: clip_of("--clip", str(text)),
    "noise": fm.uploads.noise,
    "reproducible_noise": functools.partial(fm.uploads.noise, reproducible=True),
    "mask": fm.uploads.mask,
}
"""Upload transformations by flag, in the order of the chain; this order is legal for all of them together."""

FLAGS = {
    "uploads": "--sparsify, --quantize, --clip, --noise and --mask",
    "aggregator": "--aggregator",
    "participation": "--participation, or --late and --crashed",
    "server_optimizer": "--server-optimizer",
    "devices": "--devices",
    "schedule": "--schedule",
    "attack": "--attack",
    "new_client": "Python code",
}
"""What to use for the options of a federation that are no plain values; Python code for those that are not named here."""

PLAIN = tuple(
    field.name
    for field in dataclasses.fields(fm.Federation)
    if field.name not in FLAGS
    and all(one in (bool, int, float, str, NoneType, Any) for one in get_args(field.type) or [field.type])
)
"""Options of a federation that `--federation` sets."""

PROTOCOLS = (*PAPERS, *PARTITIONS)

UNTUNED = (
    "No option was tuned: a method that does badly may only have rates that do not suit these clients. `fedjax-meta run` tunes "
    "all methods alike."
)


def compose(
    task: fm.Task,
    algorithm: str,
    *,
    estimator: str | None = None,
    estimator_options: Mapping[str, Any] | None = None,
    outer_optimizer: str | None = None,
    federation: Mapping[str, Any] | None = None,
    server_optimizer: str | None = None,
    aggregator: str | None = None,
    participation: str | None = None,
    unreliable: Mapping[str, float] | None = None,
    schedule: str | None = None,
    attack: str | None = None,
    uploads: Mapping[str, Any] | None = None,
    devices: int | None = None,
    **options: Any,
) -> fm.Algorithm:
    """A method of the registry in a federation, both with their parts given by name.

    Args:
      task: what is learned.
      algorithm: name in `fedjax_meta.METHODS`.
      estimator: name in `ESTIMATORS`, with `estimator_options`.
      outer_optimizer: name in `OPTIMIZERS`, of the clients' meta-updates.
      federation: options of `fedjax_meta.Federation` that are plain values.
      server_optimizer: name in `OPTIMIZERS` and a rate, "adam:0.01".
      aggregator: name in `AGGREGATORS` with its options, "trimmed_mean:share=0.2" or short "trimmed_mean:0.2", with wrappers
        before it, "nearest_neighbours:f=2+median"; the weighted mean when not given.
      participation: name in `PARTICIPATION` with its options, "stragglers:share=0.5,epochs=5"; all clients return when not given.
      unreliable: options of `participation.unreliable` in place of `participation`.
      schedule: name in `SCHEDULES` with its options, "poisson:rate=0.1"; uniform cohorts when not given.
      attack: name in `ATTACKS` with its options, "sign_flip:attackers=0.2,scale=10"; nobody attacks when not given.
      uploads: by name in `UPLOADS`, the argument of each.
      devices: how many devices share a cohort.
      **options: of the method.

    Raises:
      ValueError: an unknown name, an option that the method, the estimator or the federation does not take, and what they
        refuse.
    """
    checks.one_of("--algorithm", algorithm, fm.METHODS)
    try:
        if estimator is not None:
            checks.one_of("--estimator", estimator, ESTIMATORS)
            chosen = {**NEEDED.get(estimator, {}), **(estimator_options or {})}
            checks.options(estimator, chosen, _keywords(ESTIMATORS[estimator]), {})
            options["estimator"] = functools.partial(ESTIMATORS[estimator], **chosen)
        elif estimator_options:
            raise ValueError("--estimator-set needs --estimator")
        if outer_optimizer is not None:
            checks.one_of("--outer-optimizer", outer_optimizer, OPTIMIZERS)
            options["outer_optimizer"] = OPTIMIZERS[outer_optimizer]
        shared = _plain_values(algorithm, federation or {})
        if server_optimizer is not None:
            name, shared["server_lr"] = rated("--server-optimizer", server_optimizer, OPTIMIZERS, 1.0)
            shared["server_optimizer"] = OPTIMIZERS[name]
        if aggregator is not None:
            shared["aggregator"] = aggregator_of("--aggregator", aggregator)
        if schedule is not None:
            shared["schedule"] = part("--schedule", schedule, SCHEDULES)
        if attack is not None:
            shared["attack"] = part("--attack", attack, ATTACKS)
        if participation is not None:
            if unreliable:
                raise ValueError("--participation replaces --late and --crashed: write unreliable:late=...,crashed=...")
            shared["participation"] = part("--participation", participation, PARTICIPATION)
        if unreliable:
            shared["participation"] = fm.participation.unreliable(**unreliable)
        given = uploads or {}
        shared["uploads"] = tuple(make(given[name]) for name, make in UPLOADS.items() if name in given)
        shared["devices"] = devices
        return fm.federate(fm.METHODS[algorithm](task, **options), fm.Federation(**shared))
    # Builders raise TypeError for options that they do not take; here these come from the command line.
    except TypeError as error:
        raise ValueError(str(error)) from error


def of_method(words: Sequence[str]) -> dict[str, Any]:
    """The options of `--set`, which belong to the method alone.

    Raises:
      ValueError: a word that is not `key=value`, an argument of `compose` that has a flag of its own.
    """
    options = assignments(words, "--set")
    own = {"task": "--model", "estimator_options": "--estimator-set", "unreliable": "--late and --crashed", **FLAGS}
    for name, parameter in inspect.signature(compose).parameters.items():
        if name in options and parameter.kind is not parameter.VAR_KEYWORD:
            raise ValueError(f"--set cannot set {name}: use {own.get(name, '--' + name.replace('_', '-'))}")
    return options


def _keywords(function: Callable[..., Any]) -> list[str]:
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]


def _plain_values(algorithm: str, federation: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `--federation`; refuses those that have flags of their own, and those of the method."""
    checks.options("Federation", federation, fm.federation.OPTIONS, dict.fromkeys(_keywords(fm.METHODS[algorithm]), "--set"))
    for name in federation:
        if name not in PLAIN:
            raise ValueError(f"--federation cannot set {name}: use {FLAGS.get(name, 'Python code')}")
    return dict(federation)


def make_plans(
    systems: Mapping[str, Mapping[str, Any]],
    data: Clients,
    *,
    rounds: int,
    eval_every: int,
    seeds: Sequence[int],
    cohort_size: int,
    devices: int | None,
    store: str | None,
    config: Mapping[str, Any],
    delta: float | None = None,
) -> list[runner.Plan]:
    """One training run for every system and seed.

    Args:
      systems: by name, the arguments of `compose` but for the task.
      data: the clients and their model.
      rounds, eval_every, seeds, store: see `fedjax_meta.simulate`.
      cohort_size, devices: of the federation, where a system does not say otherwise.
      config: what else the results depend on.
      delta: of differential privacy, where a system has noise.
    """
    plans = []
    for name, parts in systems.items():
        federation = {"cohort_size": cohort_size, **parts.get("federation", {})}
        algorithm = compose(data.task, **{**parts, "federation": federation}, devices=devices)
        guarantee = guarantee_of(algorithm, data.train.num_clients, delta)
        if guarantee is not None:
            guarantee(rounds)  # what cannot be accounted for is refused before the run has a folder
        # Refuses a cohort that is larger than the population, before the run has a folder.
        algorithm.cohort(jax.random.key(0), 0, data.train.num_clients)
        title = parts["algorithm"] + ("*" if _changes(parts) else "")
        tests = {f"{name}/local": runner.Test(title, "local", runner.evaluator(algorithm, data.train, devices=devices))}
        if data.new is not None:
            new = runner.evaluator(algorithm, data.new, devices=devices, support="support", query="query", known=False)
            tests[f"{name}/new"] = runner.Test(title, "new", new)
        plans += [
            runner.Plan(
                name=f"{name}_seed{seed}",
                title=title,
                algorithm=algorithm,
                data=data.train,
                tests=tests,
                rounds=rounds,
                eval_every=eval_every,
                seed=seed,
                config=config,
                store=store,
                guarantee=guarantee,
            )
            for seed in seeds
        ]
    return plans


def guarantee_of(
    algorithm: fm.Algorithm, num_clients: int, delta: float | None
) -> Callable[[int], fm.privacy.Guarantee] | None:
    """`rounds -> guarantee` of a system with noise, `None` for one without.

    Raises:
      ValueError: a delta without noise, or out of range; dp-accounting is not installed.
    """
    if not any(step["name"] == "noise" for step in algorithm.config["federation"]["uploads"]):
        return None
    chosen = num_clients**-1.1 if delta is None else delta
    checks.fraction("--delta", chosen)

    @functools.cache
    def after(rounds: int) -> fm.privacy.Guarantee:
        try:
            found = fm.privacy.spent(algorithm.config, rounds, num_clients, chosen)
        except ImportError as error:
            raise ValueError(str(error)) from None
        assert found is not None
        return found

    return after


def _changes(parts: Mapping[str, Any]) -> str:
    """What a system changes about its method."""
    changed = []
    for key, value in parts.items():
        if key == "algorithm" or value is None or value == {}:
            continue
        inner = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else f"{key}={value}"
        changed.append(inner)
    return ", ".join(changed)


def write_report(
    folder: Path,
    title: str,
    changes: str,
    series: Sequence[report.Series],
    *,
    privacy: str = "",
    untrained: Mapping[str, Mapping[str, np.ndarray]] | None = None,
) -> None:
    """Prints the table, and writes it as `report.md` with `figure.png`.

    Args:
      folder, title, series: of the report.
      changes, privacy: explain the star.
      untrained: accuracy of each client of what takes no training, by title and by group of clients, see `baselines.measured`.
    """
    note = "; ".join(filter(None, [f"* {changes}" if changes else "", privacy, UNTUNED]))
    headings = ("system", "clients", "accuracy", "mean ± std over clients", "macro F1")
    rows = []
    for key in dict.fromkeys((one.title, one.clients) for one in series):
        runs = [one for one in series if (one.title, one.clients) == key]
        scores = report.over_seeds(runs)
        spread = f"{scores['accuracy_mean'][0]:.2f} ±{scores['accuracy_std'][0]:.2f}"
        rows.append(
            [
                report.marked(runs),
                key[1],
                report.with_spread(scores["accuracy"], len(runs)),
                spread,
                f"{scores['f1_mean'][0]:.2f}",
            ]
        )
    for name, groups in (untrained or {}).items():
        for group, accuracy in groups.items():
            spread = f"{100 * accuracy.mean():.2f} ±{100 * accuracy.std():.2f}"
            rows.append([name, {"known": "local"}.get(group, group), "", spread, ""])
    runner.show_table(f"{title} (percent)", headings, rows, text_columns=2)
    runner.console.print(note, style="dim", markup=False)
    report.save_figure(folder / "figure.png", series, title=title)
    table = report.markdown_table(headings, rows, text_columns=2)
    lines = [f"# {escape.markdown(title)}", "", table, "", escape.markdown(note), ""]
    lines += ["![Accuracy by round and its spread over clients](figure.png)", ""]
    checkpoint.write_text(folder / "report.md", "\n".join([*lines, f"    {runner.command_line(folder)}", ""]))
    runner.console.print(f"\nreport, figure, metrics and states: {folder}", soft_wrap=True, markup=False)


app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def main(  # long because every option brings its help text
    algorithm: Annotated[str, typer.Option(help="Method: " + ", ".join(fm.METHODS) + ".")] = "fedmeta",
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
        str | None,
        typer.Option(help="Learned inner rates that stay with their client; needs --learned-rates.", show_default=False),
    ] = None,
    learned_rates: Annotated[bool, typer.Option("--learned-rates", help="Learn the inner rates (Meta-SGD).")] = False,
    adapts: Annotated[str | None, typer.Option(help="Leaves that adaptation moves (head: ANIL).", show_default=False)] = None,
    outer_optimizer: Annotated[
        str | None,
        typer.Option(help="Optimiser of the clients' meta-updates: " + ", ".join(OPTIMIZERS) + ".", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other option of the method, e.g. inner_lr=0.01; may be repeated."
        ),
    ] = None,
    federation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="An option of the federation: " + ", ".join(PLAIN) + "; may be repeated.",
        ),
    ] = None,
    server_optimizer: Annotated[
        str | None, typer.Option(metavar="NAME:RATE", help="Optimiser of the server, e.g. adam:0.01.", show_default=False)
    ] = None,
    aggregator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help="What the server makes of uploads: " + ", ".join(AGGREGATORS) + ", e.g. `trimmed_mean:share=0.2`.",
            show_default=False,
        ),
    ] = None,
    participation: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help="What becomes of a client that was asked: "
            + ", ".join(PARTICIPATION)
            + ", e.g. `unreliable:late=0.1,crashed=0.1` or `stragglers:share=0.5,epochs=5`.",
            show_default=False,
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help="Which clients take part: "
            + ", ".join(SCHEDULES)
            + ", e.g. `poisson:rate=0.1`, whose --clients-per-round is "
            "the most that a round can hold.",
            show_default=False,
        ),
    ] = None,
    attack: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:KEY=VALUE,...",
            help="What some clients do to harm the others: "
            + ", ".join(ATTACKS)
            + ", e.g. `sign_flip:attackers=0.2,scale=10`.",
            show_default=False,
        ),
    ] = None,
    late: Annotated[float, typer.Option(help="Probability that a client's upload is late.")] = 0.0,
    crashed: Annotated[float, typer.Option(help="Probability that a client crashes in a round.")] = 0.0,
    sparsify: Annotated[
        float | None, typer.Option(help="Share of an upload's numbers that are sent, with error feedback.", show_default=False)
    ] = None,
    quantize: Annotated[int | None, typer.Option(help="Bits for each number of an upload.", show_default=False)] = None,
    clip_: Annotated[
        str | None,
        typer.Option(
            "--clip", metavar="NORM", help="Largest norm of an upload, or `adaptive:KEY=VALUE,...`.", show_default=False
        ),
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Noise multiplier of differential privacy; needs --clip.", show_default=False)
    ] = None,
    reproducible_noise: Annotated[
        bool, typer.Option("--reproducible-noise", help="Take the noise from --seeds: for studies, it protects nobody.")
    ] = False,
    delta: Annotated[
        float | None, typer.Option(help="Of differential privacy; N^-1.1 for N clients when not given.", show_default=False)
    ] = None,
    mask: Annotated[
        int | None,
        typer.Option(help="Secure aggregation (simulated): binary digits after the point, e.g. 16.", show_default=False),
    ] = None,
    compare: Annotated[
        str, typer.Option(help="Methods to run beside it, separated by commas; they have their default options.")
    ] = "",
    dataset: Annotated[
        str, typer.Option(help="`mnist_small`, `digits`, an .npz, or a set of tensorflow-datasets.")
    ] = "mnist_small",
    protocol: Annotated[str, typer.Option(help="How samples are divided: " + ", ".join(PROTOCOLS) + ".")] = "fedmeta_per",
    protocol_set: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the division, e.g. concentration=0.3; may be repeated."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of clients; the protocol's own when not given.", show_default=False)
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--model",
            help=", ".join(models.MODELS) + "; when not given lenet for colour images, else mlp.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds R.")] = 40,
    eval_every: Annotated[int, typer.Option(min=1, help="Rounds between evaluations; the first and the last are added.")] = 20,
    clients_per_round: Annotated[int, typer.Option(min=1, help="Cohort size C.")] = 5,
    seeds: Annotated[str, typer.Option(help="Seeds of training, e.g. 1,2,3.")] = "1",
    data_seed: Annotated[int, typer.Option(help="Fixes clients and their samples.")] = 1,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where to keep what clients keep, when a device has no room for all of it: `memory` (the host's) or a folder; "
            "the device when not given.",
            show_default=False,
        ),
    ] = None,
    out: runner.OutOption = None,
    data_dir: runner.DataDirOption = None,
    resume: runner.ResumeOption = False,
    devices: runner.DevicesOption = None,
    compile_cache: runner.CacheOption = True,
    on_divergence: runner.DivergenceOption = "continue",
    debug: runner.DebugOption = False,
) -> None:
    """Runs one composition, and methods to compare it with, on any data set; prints a table and writes a report with a figure.

    `python -m experiments.compose --algorithm fedmeta_per --estimator implicit`

    `python -m experiments.compose --algorithm fedper --federation cohort_size=10`

    Local clients are tested on samples that they kept back; where the protocol has new clients, these are tested too.

    Compositions that no source paper reports:

    `--algorithm fedmeta_per --estimator implicit --set batch_size=None` (FedMeta-Per x iMAML; also `first_order`, `reptile`,
    `hessian_free`)

    `--algorithm fedmeta --personal head+bn_affine --model mtfl_mlp` (private batch norms beside the private head)

    `--algorithm fedmeta --learned-rates --personal-rates all` (private rates, shared model), or `--personal head
    --personal-rates none` (shared rates, private head)

    `--algorithm fedmeta_per --server-optimizer adam:0.001`

    `--algorithm reptile --personal bn --model mtfl_mlp --set weighting=samples --server-optimizer momentum:0.1`

    `--algorithm fedper --federation cohort_size=10 --clip 1.0 --noise 0.5 --federation weighting=uniform`
    """
    with runner.one_line_errors(debug):
        checks.one_of("--on-divergence", on_divergence, runner.ON_DIVERGENCE)
        checks.one_of("--protocol", protocol, PROTOCOLS)
        unreliable = {name: value for name, value in (("late", late), ("crashed", crashed)) if value != 0}
        noised = "reproducible_noise" if reproducible_noise else "noise"
        flags = {"sparsify": sparsify, "quantize": quantize, "clip": clip_, noised: noise, "mask": mask}
        named = {"personal": personal, "personal_rates": personal_rates, "adapts": adapts}
        named |= {"learned_rates": True if learned_rates else None}
        systems: dict[str, dict[str, Any]] = {
            "composition": {
                "algorithm": algorithm,
                "estimator": estimator,
                "estimator_options": assignments(estimator_set or (), "--estimator-set"),
                "outer_optimizer": outer_optimizer,
                "federation": assignments(federation or (), "--federation"),
                "server_optimizer": server_optimizer,
                "aggregator": aggregator,
                "participation": participation,
                "unreliable": unreliable,
                "schedule": schedule,
                "attack": attack,
                "uploads": {name: value for name, value in flags.items() if value is not None},
                **of_method(set_ or ()),
                **{name: value for name, value in named.items() if value is not None},
            }
        }
        for name in filter(None, (name.strip() for name in compare.split(","))):
            systems[name] = {"algorithm": name}
        # Names are checked before the data are loaded.
        for parts in systems.values():
            checks.one_of("--algorithm", parts["algorithm"], fm.METHODS)
        if network is not None:
            checks.one_of("--model", network, models.MODELS)
        seed_list = runner.numbers(seeds, "--seeds")
        for seed in seed_list:
            checks.seed("--seeds", seed)
        checks.seed("--data-seed", data_seed, bits=32)
        shared = runner.prepare(devices, compile_cache, cohort_size=clients_per_round)
        given = assignments(protocol_set or (), "--protocol-set")
        scenario = Scenario(dataset=dataset, partition=protocol, options=given, clients=clients, model=network, seed=data_seed)
        with runner.loading(dataset):
            data = scenario.build(None if data_dir is None else str(data_dir))
        config = {"experiment": "compose", "dataset": dataset, "protocol": protocol, "clients": clients}
        config |= {"protocol_options": given, "data_seed": data_seed, "model": network}
        plans = make_plans(
            systems,
            data,
            rounds=rounds,
            eval_every=eval_every,
            seeds=seed_list,
            cohort_size=clients_per_round,
            devices=shared,
            store=store,
            delta=delta,
            config=config,
        )
        runner.check_titles(plans)
        options = {**config, "systems": systems, "rounds": rounds, "eval_every": eval_every, "seeds": seed_list}
        if store is not None and store != "memory":
            checks.writable("--store", Path(store) / "rows")
        folder = runner.open_folder(
            out, f"compose-{algorithm}", resume=resume, options=options, algorithms=runner.configs(plans)
        )
        results = runner.run_all(plans, folder, on_divergence=on_divergence)
        changes = _changes(systems["composition"])
        series = runner.all_series(plans, results)
        spent = next((str(plan.guarantee(rounds)) for plan in plans if plan.guarantee is not None), "")
        title, tests = f"{data.title}: round {rounds}", baselines.measured(data, seed_list[0])
        untrained = {name: {group: np.array(test["accuracy"]) for group, test in of.items()} for name, of in tests.items()}
        write_report(folder, title, changes, series, privacy=spent, untrained=untrained)
        runner.exit_if_all_diverged(plans, results)


if __name__ == "__main__":
    app()
