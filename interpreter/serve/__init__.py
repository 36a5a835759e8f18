"""An engine behind HTTP: OpenAI's protocol and SGLang's own, for programs elsewhere that use the same tree."""
