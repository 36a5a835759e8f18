"""Small chat templates of our own, each with what is peculiar to the templates of one family of models."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A system turn of its own where there is none."""

LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set rest, system = messages[1:], messages[0].content %}"
    "{% else %}{% set rest, system = messages, none %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system is not none %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""The system's text in the first turn of the user, a BOS before every turn of the user, no generation prompt."""

LLAMA3 = (
    "{% for m in messages %}"
    "{% set text = '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' %}"
    "{{ bos_token + text if loop.first else text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
"""The system's text moves to the newest turn of the user: history is written anew in every turn."""

GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|/turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)

PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
"""An end of the text behind the last turn, which is not there any more when the next one begins."""

DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<|user|>' + m.content }}"
    "{% else %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""Reasoning is asked for, and left out of turns that are over."""

TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name else '' }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PRINTS_ARGUMENTS = TOOLS.replace("call.function.arguments | tojson", "call.function.arguments")
ADDS_ARGUMENTS = TOOLS.replace(
    "{{ call.function.name }}({{ call.function.arguments | tojson }})",
    "{{ call.function.name + '(' + call.function.arguments + ')' }}",
)

FAMILIES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": PHI,
    "deepseek": DEEPSEEK,
    "tools": TOOLS,
}
CONTROL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|head|>", "<|/head|>", "<|eot|>", "<|turn|>",
    "<|/turn|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
]  # fmt: skip
