"""LangChain on `branchwise serve`: `pip install langchain-openai`, and its model is pointed at the URL.

    branchwise serve smollm2-135m &
    python examples/serving/with_langchain.py http://127.0.0.1:8000/v1
"""

import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Answer(BaseModel):
    """A number and its unit."""

    number: int = Field(ge=0, le=1000)
    unit: str = Field(max_length=12)


def main(url: str) -> None:
    model = ChatOpenAI(base_url=url, api_key="none", model="smollm2-135m", temperature=0, max_tokens=48)
    prompt = ChatPromptTemplate.from_messages([("system", "Answer in one sentence."), ("user", "{question}")])
    chain = prompt | model
    for chunk in chain.stream({"question": "What is the capital of France?"}):
        print(chunk.content, end="")
    print()
    typed = prompt | model.with_structured_output(Answer, method="json_schema")
    print(typed.batch([{"question": "How many days has a week?"}, {"question": "How many hours has a day?"}]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
