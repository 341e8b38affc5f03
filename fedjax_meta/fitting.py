"""How many lanes fit the memory of an accelerator.

A bound on the memory of a program follows from the values that it computes, without compiling it, and most cohorts are far below.
Where the bound is above the memory, the program is compiled with all lanes, and with fewer only if it does not fit. What a
compiled program takes is kept on disk, because compiling takes seconds.
"""

import hashlib
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxprs_in_params
from jax.sharding import SingleDeviceSharding

from fedjax_meta import disk, runtime

COPIES = 2
"""Layouts of one value at a time: XLA may hold a transposed or converted copy of what it computes."""

_TILE = {"tpu": (8, 128)}
"""Platforms that pad the last two axes of an array: to multiples of what."""

_log = logging.getLogger("fedjax_meta")


def lanes(group: Callable[[int], ClosedJaxpr], share: int, given: int | None, device: jax.Device, free: float) -> int:
    """The lanes of a cohort: those that were given, or as many of `share` clients as fit.

    Args:
      group: lanes -> the program of so many clients side by side.
      share: clients of the cohort on one device.
      given: what the caller asks for, `None` for as many as fit.
      device: for which a program is compiled, if its bound is too large.
      free: bytes that the lanes may take.

    Raises:
      ValueError: the given lanes do not fit.
    """
    wanted = share if given is None else min(given, share)
    count, need = wanted, 0
    while True:
        program = group(count)
        need = bound(program, device.platform)
        if need > free:
            need = compiled_bytes(program, device)
        if need <= free or (count == 1 and given is None):
            break
        # Memory that lanes share is counted once per lane, so the next guess tends to be too small.
        fewer = max(1, min(count - 1, math.floor(count * free / need)))
        if given is not None:
            raise ValueError(
                f"lanes={given} take {need / 1e9:.3g} GB on each device, but only {free / 1e9:.3g} GB are free for them: give "
                f"about lanes={fewer}, or None for as many as fit"
            )
        count = fewer
    _log.debug("%d of %d clients side by side take at most %.3g GB on %s", count, share, need / 1e9, device)
    return count


def bound(program: ClosedJaxpr, platform: str) -> int:
    """Bytes that a program cannot exceed: all of its values at once, each `COPIES` times, padded as the platform does.

    The body of a loop counts once, because its steps use the same memory, and every branch of a condition counts.
    """
    tile = _TILE.get(platform, (1, 1))
    seen: dict[int, int] = {}

    def of(jaxpr: Any) -> int:
        if id(jaxpr) not in seen:
            total = sum(_padded(var.aval, tile) for var in (*jaxpr.invars, *jaxpr.constvars))
            for equation in jaxpr.eqns:
                total += sum(_padded(var.aval, tile) for var in equation.outvars)
                total += sum(of(inner) for inner in jaxprs_in_params(equation.params))
            seen[id(jaxpr)] = total
        return seen[id(jaxpr)]

    return COPIES * of(program.jaxpr)


def _padded(aval: Any, tile: tuple[int, int]) -> int:
    """Bytes of a value in tiles; 0 for what is no array."""
    if not hasattr(aval, "shape"):
        return 0
    shape = (1, 1, *aval.shape)
    rows, columns = (-(-extent // step) * step for extent, step in zip(shape[-2:], tile, strict=True))
    itemsize = getattr(aval.dtype, "itemsize", 16)
    return math.prod(shape[:-2]) * rows * columns * itemsize


def compiled_bytes(program: ClosedJaxpr, device: jax.Device) -> int:
    """Bytes that a compiled program takes on a device besides its arguments; from the disk if it was compiled before."""
    place = SingleDeviceSharding(device)
    count = len(program.consts)
    values = [*program.jaxpr.constvars, *program.jaxpr.invars]
    arguments = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=place) for var in values]

    def run(*arguments: Any) -> Any:
        return jax.core.eval_jaxpr(program.jaxpr, arguments[:count], *arguments[count:])

    lowered = jax.jit(run).lower(*arguments)
    words = (jax.lib.__version__, device.device_kind, str(runtime.compiler_options()), lowered.as_text())
    file = runtime.cache_folder() / "memory" / hashlib.sha256("\n".join(words).encode()).hexdigest()
    if file.is_file():
        return int(file.read_text())
    analysis: Any = runtime.compiled(lowered).memory_analysis()
    needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    try:
        disk.write_text(file, str(needed))
    except OSError as error:
        _log.warning("what a program takes is not kept, so that it is compiled again: %s", error)
    return needed
