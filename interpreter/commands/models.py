"""`branchwise models`: those with a short name, and where they are; `fetch` gets one."""

from __future__ import annotations

from argparse import Namespace

from branchwise.runtime.models import fetch, listings


def run(options: Namespace) -> int:
    if options.action == "fetch":
        print(f"{options.name} is ready: {fetch(options.name)}")
        return 0
    for listing in listings():
        state = f"ready: {listing.folder}" if listing.folder else "not fetched"
        print(f"{listing.model.name}  {state}\n  {listing.model.size}; from {listing.model.source}")
    return 0
