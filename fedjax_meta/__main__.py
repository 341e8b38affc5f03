"""`python -m fedjax_meta`, see `cli`."""

from fedjax_meta.cli import app

app(prog_name="fedjax-meta")
