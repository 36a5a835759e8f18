"""Questions become queries: a small SQL as a grammar, whose tables and columns are the only ones there are."""

from branchwise import Engine, State, function, gen

SQL = r"""
start: "SELECT " columns " FROM " table (" WHERE " condition)? ";"
columns: "*" | column (", " column)* | "COUNT(*)"
table: "people" | "towns"
column: "name" | "age" | "town" | "population"
condition: column " " /=|<|>/ " " value ((" AND " | " OR ") column " " /=|<|>/ " " value)?
value: /[0-9]{1,7}/ | /'[A-Za-z ]{1,30}'/
"""
WORKED = """Tables: people(name, age, town), towns(name, population).

Question: Who is older than 30?
SQL: SELECT name FROM people WHERE age > 30;

Question: How many towns are there?
SQL: SELECT COUNT(*) FROM towns;

"""
QUESTIONS = ["Which people live in Paris?", "Which towns have a population of more than 50000?"]


@function
def ask(s: State, question: str) -> str:
    s += WORKED + f"Question: {question}\nSQL: " + gen("sql", grammar=SQL, temperature=0, max_tokens=40)
    return s["sql"]


def main(engine: Engine) -> None:
    before = engine.stats
    for state in ask.run_batch([{"question": question} for question in QUESTIONS], backend=engine):
        print(state.ret_value)
    print(engine.stats.since(before).hits)


if __name__ == "__main__":
    main(Engine("smollm2-135m"))
