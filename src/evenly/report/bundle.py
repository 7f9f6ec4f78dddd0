"""The JavaScript that draws the charts. The only module that uses vl-convert-python."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from evenly.errors import SettingError


def installed() -> bool:
    return find_spec("vl_convert") is not None


@cache
def javascript() -> str:
    """Vega, Vega-Lite and vega-embed in one, 0.9 MB, safe to stand in a page's script."""
    if not installed():
        raise SettingError(
            "the report's charts need vl-convert-python, which is not installed: "
            "pip install vl-convert-python"
        )
    text: str = import_module("vl_convert").javascript_bundle()
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
