"""An extension of griffe, by which mkdocstrings reads: a docstring's lines on each parameter become a list."""

import re
from typing import Any

from griffe import Extension, Object

_PARAMETER = re.compile(r"^(?=`\w+`(?:, `\w+`)*[^`\n]*:)", re.MULTILINE)


class Parameters(Extension):
    """Each line that begins with a parameter's name in backticks and a colon begins an item."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of anything that has one."""
        if obj.docstring:
            obj.docstring.value = _PARAMETER.sub("\n- ", obj.docstring.value)
