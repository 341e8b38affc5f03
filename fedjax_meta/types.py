"""Names for the types that recur in signatures.

A pytree has no static type in Python, so that most names below stand for `Any` and tell the reader, not the type checker, what
is meant.
"""

from typing import Any, TypeAlias

import jax

Key: TypeAlias = jax.Array
"""A typed JAX PRNG key (`jax.random.key`); a scalar unless a shape is given."""

PyTree: TypeAlias = Any
"""Any nest of dicts, tuples, lists and registered classes with arrays as leaves."""

Params: TypeAlias = Any
"""A pytree of floating-point arrays that gradients are taken for."""

Variables: TypeAlias = Any
"""A pytree of all arrays of a model: its parameters and, where there are any, its buffers (batch-norm statistics)."""

Updates: TypeAlias = Any
"""A pytree like `Params` that is added to them or that an optimiser descends along."""

Mask: TypeAlias = Any
"""A pytree with a Python bool at every leaf of the tree that it describes."""

Roles: TypeAlias = Any
"""A pytree with a `masks.Role` at every leaf of the model that it describes."""

Scalar: TypeAlias = Any
"""A number or an array of shape `[]`; may be traced."""

Rate: TypeAlias = Any
"""A hyper-parameter that may be traced, so that a grid of values is one program: a number or an array of shape `[]`."""
