"""One command to its exit code: what goes wrong is said on stderr, errors of ours in one line."""

from __future__ import annotations

import os
import sys
from argparse import Namespace

from branchwise.lang import LangError
from branchwise.runtime import EngineError

from ..errors import RunError
from . import bench, chat, demo, models, run, tree
from .errors import Failed, WrongArgument

COMMANDS = {
    "bench": bench.run,
    "chat": chat.run,
    "demo": demo.run,
    "models": models.run,
    "run": run.run,
    "tree": tree.run,
}
DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


def perform(options: Namespace) -> int:
    """Run the command `options.command`.

    Returns:
        0, 1 if it failed, 2 for a wrong argument, 130 if it was interrupted.
    """
    try:
        return COMMANDS[options.command](options)
    except WrongArgument as error:
        return _said(f"branchwise {options.command}: {error}", WRONG)
    except (EngineError, LangError, RunError) as error:
        return _said(f"branchwise: error: {error}", FAILED)
    except Failed as error:
        return _said(str(error), FAILED)
    except KeyboardInterrupt:
        return _said("branchwise: interrupted", INTERRUPTED)
    except BrokenPipeError:  # who reads has seen enough; Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _said(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
