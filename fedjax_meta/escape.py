"""Text of a user (paths, names, masks) inside a console's markup, a Markdown, HTML or LaTeX page, or the label of a figure.

`runs/lr[0.1]`, `path:a|b*` and `a$b` would otherwise be read as a style, the end of a cell, emphasis and a formula.
"""

import html as _html
import re


def console(text: object) -> str:
    """Text that rich shows as it is, where markup is on.

    Example:
      >>> print(console("runs/lr[red]"))
      runs/lr\\[red]
    """
    from rich.markup import RE_TAGS

    # rich's own `escape` loses a backslash before a bracket that begins no tag: there, rich reads `\[` as a bracket.
    plain, parts, end = str(text), [], 0
    for tag in RE_TAGS.finditer(plain):
        slashes = tag[2]
        parts += [plain[end : tag.start()].replace("\\[", "\\\\["), slashes * 2, "\\", tag[1].removeprefix(slashes)]
        end = tag.end()
    parts.append(plain[end:].replace("\\[", "\\\\["))
    # One at the end would escape what follows.
    return "".join(parts) + "\\" * (plain.endswith("\\") and not plain.endswith("\\\\"))


def markdown(text: object) -> str:
    """Text that a Markdown page, or a cell of its tables, shows as it is, on one line.

    Example:
      >>> print(markdown("path:a|b*, <none>"))
      path:a\\|b\\*, &lt;none&gt;
    """
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", " ".join(str(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def html(text: object) -> str:
    """Text that an HTML page shows as it is, in an attribute too.

    Example:
      >>> html('<b> & "c"')
      '&lt;b&gt; &amp; &quot;c&quot;'
    """
    return _html.escape(str(text))


def label(text: object) -> str:
    """Text that matplotlib draws as it is, instead of as a formula between dollar signs.

    Example:
      >>> print(label("a$b$"))
      a\\$b\\$
    """
    return str(text).replace("$", r"\$")


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": "$<$",
    ">": "$>$",
}


def latex(text: object) -> str:
    """Text that LaTeX prints as it is.

    Example:
      >>> print(latex("100 % of lr_1 & ±2"))
      100 \\% of lr\\_1 \\& $\\pm$2
    """
    return re.sub(r"[\\&%$#_{}~^±<>]", lambda found: _LATEX.get(found[0], "\\" + found[0]), " ".join(str(text).split()))
