"""Refuses a method and a federation that cannot go together. `leaks` refuses what only a trace of the client rule tells."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fedjax_meta import checks
from fedjax_meta.aggregate import Rule
from fedjax_meta.asynchronous import Asynchronous
from fedjax_meta.contract import REFUSABLE, Method
from fedjax_meta.federation import Federation
from fedjax_meta.masks import Role
from fedjax_meta.rounds.trees import parts
from fedjax_meta.uploads import TRANSFORMATIONS, Chain, kinds


def refuse(method: Method, federation: Federation) -> None:
    """Raises `ValueError` if a method cannot run in a federation, or has a field of another kind than its rules need."""
    _check_kinds(method)
    if method.collaborate is not None:
        for words in (method.collaborate.reads, method.collaborate.gives):
            _check_names(words)
        if method.collaborate.reads:
            refuse_hiding_uploads(method, federation)
    if method.separate_models and not method.divides_by_statistics:
        raise ValueError(f"separate_models of {method.name} need divides_by_statistics=True, and their shares as statistics")
    if method.separate_models and Role.BUFFER in jax.tree.leaves(method.roles):
        raise ValueError(f"separate_models of {method.name} must be shared leaves: a mean of buffers knows no models")
    if method.inherit is not None and not (method.separate_models and method.whole_population):
        raise ValueError(f"inherit of {method.name} needs separate_models=True and whole_population=True")
    _refuse_what_the_method_does(method, federation)
    _refuse_handing_out_rows(method, federation)
    if isinstance(federation.schedule, Asynchronous):
        _refuse_asynchronous(method, federation, federation.schedule.name)
    if method.travels is not None and federation.uploads:
        raise ValueError(
            f"{method.name} sends other numbers than those that the simulation averages: uploads= cannot change them"
        )
    averaged = {Role.SHARED, Role.BUFFER} & {*jax.tree.leaves(method.roles)} or federation.average_personal
    if federation.uploads and not averaged and not method.sends_statistics:
        raise ValueError(f"{method.name} sends nothing that is averaged, so that uploads= would change nothing: leave it out")
    own, rate = method.server_optimizer is not None, federation.server_lr
    if own and rate is not None and federation.server_optimizer is None:
        raise ValueError(
            f"{method.name} has a server optimiser of its own: server_lr={rate} alone would replace it by SGD; give "
            "server_optimizer too, or set the rate in the method"
        )


def _check_kinds(method: Method) -> None:
    for name in ("remember", "update_extra", "inherit", "direction", "new_client", "travels"):
        rule = getattr(method, name)
        if rule is not None and not callable(rule):
            raise ValueError(f"{name} of {method.name} must be a function, not {checks.shown(rule)}")
    for field in dataclasses.fields(method):
        if field.type is bool:
            checks.flag(field.name, getattr(method, field.name))
    if not isinstance(method.refuses, Mapping):
        raise ValueError(f"refuses={checks.shown(method.refuses)} of {method.name} must be a mapping, e.g. {{'clip': 'why'}}")


def refuse_hiding_uploads(method: Method, federation: Federation) -> None:
    """Raises `ValueError` if uploads are hidden from the server; for a method whose server must see them."""
    hiding = sorted({"noise", "mask"} & kinds(federation.uploads))
    if hiding:
        raise ValueError(
            f"{method.name} lets the server see what each client sends by itself, which {' and '.join(hiding)} cannot cover"
        )


def _check_names(words: str) -> None:
    parts({"personal": (), "memory": ()}, words)


def _refuse_what_the_method_does(method: Method, federation: Federation) -> None:
    """Raises `ValueError` for what `Method.refuses` names."""
    f = federation
    given = kinds(f.uploads)
    given |= {"feedback"} if any(transform.has_feedback for transform in f.uploads) else set()
    given |= {"weighting"} if f.weighting not in (None, method.weighting) else set()
    given |= {"server_optimizer"} if f.server_optimizer is not None else set()
    rule = f.aggregator if isinstance(f.aggregator, Rule) else None
    given |= {"an aggregator with a memory"} if rule and jax.tree.leaves(rule.init(jnp.zeros(1))) else set()
    given |= {"an aggregator of changes"} if rule and rule.differences else set()
    if rule and rule.differences and method.weighs_by_statistics:
        raise ValueError(
            f"{method.name} cannot go with {rule.name}: it would bound changes and the amounts that they are multiplied by"
        )
    given |= {name for name in ("aggregator", "participation", "attack") if getattr(f, name) is not None}
    clips = sorted({"clip", "adaptive_clip"} & given) if "noise" not in given else []
    given |= {"clip without noise"} if clips else set()
    if clips and method.divides_by_statistics and method.sends_statistics:
        raise ValueError(
            f"{method.name} divides a mean of changes by a mean of amounts; {clips[0]} would shrink both and bound nothing: add "
            "noise, or give aggregator=norm_bounding(...)"
        )
    for name, why in method.refuses.items():
        checks.one_of(f"refuses of {method.name}", name, [*REFUSABLE, *TRANSFORMATIONS])
        if name in given:
            raise ValueError(f"{method.name} cannot go with {name}: {why}")


def _refuse_handing_out_rows(method: Method, federation: Federation) -> None:
    """Raises `ValueError` if new clients would read rows that noise does not cover."""
    _check_names(method.new_client_reads)
    reads = method.new_client is not None and federation.new_client is None and method.new_client_reads
    if reads and Chain(federation.uploads).fixed_divisor:
        raise ValueError(
            f"new clients of {method.name} read what trained clients keep ({method.new_client_reads}), which noise does not "
            'cover: give Federation(new_client="fresh"), with which they start from the server\'s model'
        )


def _refuse_asynchronous(method: Method, federation: Federation, name: str) -> None:
    """Raises `ValueError` if an asynchronous method sends more than changes of shared parameters; the rest would be stale."""
    more = {
        "reads what clients keep after a round (collaborate)": method.collaborate is not None,
        "keeps more at the server than its model (update_extra)": method.update_extra is not None,
        "steps along more than a mean of changes (direction)": method.direction is not None,
        "divides a mean of changes by another mean (divides_by_statistics)": method.divides_by_statistics,
        "sends other numbers than those that the simulation averages (travels)": method.travels is not None,
    }
    for what, is_so in more.items():
        if is_so:
            raise ValueError(f"{method.name} {what}: {name} takes methods whose uploads are changes of shared leaves alone")
    if Chain(federation.uploads).fixed_divisor:
        raise ValueError(f"{name} draws no cohorts at random, which noise needs: leave one of them out")
    rule = federation.aggregator
    if isinstance(rule, Rule) and rule.differences:
        raise ValueError(
            f"{rule.name} would bound changes that {name} has weighed by their staleness, and so take back the weight: let "
            "clients bound them, uploads=(fm.uploads.clip(...),), or give a rule about order or distance, aggregate.median"
        )
    if federation.average_personal:
        raise ValueError(f"average_personal takes means of whole leaves, which {name} cannot weigh: leave one of them out")
