"""Dates by a regex: whatever the model would say, what comes back is written as a date."""

from branchwise import Engine, State, function, gen

DATE = r"(1[0-9]|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
EVENTS = ["The first people walk on the moon", "The Berlin Wall falls", "The Titanic sinks"]
WORKED = """Events and their dates, written as year-month-day.

The French Bastille is stormed: 1789-07-14
The United States declare their independence: 1776-07-04
"""


@function
def when(s: State, event: str) -> str:
    s += WORKED + f"{event}: " + gen("date", regex=DATE, temperature=0)
    return s["date"]


def main(engine: Engine) -> None:
    before = engine.stats
    for event, state in zip(EVENTS, when.run_batch([{"event": e} for e in EVENTS], backend=engine), strict=True):
        print(f"{state.ret_value}  {event}")
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
