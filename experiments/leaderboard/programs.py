"""What a training would compute: a digest of its programs and of what they are given, without training anything.

If two versions of the code give a training the same programs, they give it the same numbers. Tracing takes seconds where a
training takes minutes. This file is also run as a program with the source of another commit, so that it imports nothing of
`experiments`, and of the package only what every version has.
"""

import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock


class _Found(BaseException):
    """Ends a training when its programs are there; no handler of errors may take it for one."""


def digest(words: Sequence[str]) -> str:
    """The digest of the first programs that `fedjax-meta run` compiles with these words.

    They are the first state, a block of rounds and the tests, as StableHLO, with the numbers of the method, the keys, and the
    arrays of the clients.

    Raises:
      ValueError: the command ended without them.
    """
    import jax
    import numpy as np

    from fedjax_meta import __main__ as command
    from fedjax_meta import sweeps

    begin, texts = sweeps.Programs.__init__, []

    def lowered(program: Any, *_: Any, **__: Any) -> None:
        texts.append(program.as_text())

    def stop(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        with mock.patch.object(jax.stages.Lowered, "compile", lowered):
            self.compile()
        given = self.place_data(), self.who(np.arange(len(self.members)), np.ones(len(self.members)))
        found = hashlib.blake2b("\n".join([*sorted(texts), str(jax.tree.structure(given))]).encode(), digest_size=16)
        for leaf in jax.tree.leaves(given):
            array = np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        raise _Found(found.hexdigest())

    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["fedjax-meta", "run", *words]))
        stack.enter_context(mock.patch.object(sweeps.Programs, "__init__", stop))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        try:
            command.main()
        except _Found as found:
            return str(found)
        except SystemExit:
            pass
    raise ValueError(f"{' '.join(words)} ended without programs: {' '.join(said.getvalue().split())[-200:]}")


def main() -> None:
    """Reads lists of words from the standard input, a JSON value, and writes a line for each: the digest, or nothing."""
    for words in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as place:
            try:
                print(digest([*words, "--out", str(Path(place) / "run")]), flush=True)
            except ValueError as error:
                print(error, file=sys.stderr)
                print(flush=True)


if __name__ == "__main__":
    main()
