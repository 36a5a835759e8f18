"""Programs on a server that speaks OpenAI's protocol."""

from .backend import OpenAI
from .dialect import DIALECTS, Dialect
from .errors import ServerError, Unsupported

__all__ = ["DIALECTS", "Dialect", "OpenAI", "ServerError", "Unsupported"]
