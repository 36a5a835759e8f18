"""States for people: as HTML in notebooks, while they grow and after."""

from .live import live
from .page import as_html

__all__ = ["as_html", "live"]
