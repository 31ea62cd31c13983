# ruff: noqa: RUF001
"""Chat templates in the shape of families that trl's wheel lacks, in our own short form."""

from __future__ import annotations

MISTRAL_V3 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- raise_exception('no system turn') if not loop.first -}}
{%- elif m.role == 'user' -%}
{%- if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] -%}
{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST] ' -}}
{%- if loop.index0 == 1 and messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- m.content + '[/INST]' -}}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for c in m.tool_calls -%}
{%- if not c.id is defined or c.id | length != 9 -%}{{- raise_exception('ids of 9 letters') -}}{%- endif -%}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- ']' + eos_token -}}
{%- else -%}{{- ' ' + m.content | trim + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""

# v1: words, no tokens, round the questions; roles in turn, no system turn.
MISTRAL_V1 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- ' [INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token -}}
{%- endfor -%}
"""

# v7 and v11: a system turn of its own; calls by name in v11.
MISTRAL_V7 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' -}}
{%- elif m.role == 'user' -%}
{%- if tools and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] -%}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST]' + m.content + '[/INST]' -}}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS]' + (m.tool_calls | map(attribute='function') | list | tojson) + eos_token -}}
{%- else -%}{{- m.content + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""
MISTRAL_V11 = MISTRAL_V7.replace(
    "{{- '[TOOL_CALLS]' + (m.tool_calls | map(attribute='function') | list | tojson) + eos_token -}}",
    "{{- m.content -}}{%- for c in m.tool_calls -%}"
    "{{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + (c.function.arguments | tojson) -}}"
    "{%- endfor -%}{{- eos_token -}}",
)

LLAMA_2 = """\
{%- set first = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for m in messages if m.role != 'system' -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{%- if m.role == 'user' -%}
{{- bos_token + '[INST] ' + (first if loop.first else '') + m.content | trim + ' [/INST]' -}}
{%- else -%}{{- ' ' + m.content | trim + ' ' + eos_token -}}{%- endif -%}
{%- endfor -%}
"""

# The first template of Llama 3: a header follows whether it is asked for or not.
LLAMA_3_FIRST = """\
{%- for m in messages -%}
{{- (bos_token if loop.first else '') + '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
{{- m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
"""

LLAMA_4 = """\
{{- bos_token -}}
{%- if tools -%}{{- '<|header_start|>system<|header_end|>\\n\\n' + (tools | tojson) + '<|eot|>' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|header_start|>' + ('ipython' if m.role == 'tool' else m.role) + '<|header_end|>\\n\\n' -}}
{%- if m.role == 'tool' -%}{{- m.content | tojson -}}{%- else -%}{{- m.content | trim -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}
{{- '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' -}}
{%- endfor -%}
{{- '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|header_start|>assistant<|header_end|>\\n\\n' -}}{%- endif -%}
"""

_CALLS = """\
{%- for c in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
"""
_TOOLS = """\
{%- if tools -%}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' -}}{%- endif -%}
"""
# The header opens the reasoning, and no turn shows any.
QWQ = f"""\
{_TOOLS}
{{%- for m in messages -%}}
{{{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}}}
{{{{- m.content.split('</think>')[-1].lstrip('\\n') -}}}}
{_CALLS}
{{{{- '<|im_end|>\\n' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n<think>\\n' -}}}}{{%- endif -%}}
"""
# Reasoning of replies after the last question, with an empty one in a last reply that has none.
QWEN3_THINKING = f"""\
{_TOOLS}
{{%- set last = namespace(user=0) -%}}
{{%- for m in messages if m.role == 'user' -%}}{{%- set last.user = messages.index(m) -%}}{{%- endfor -%}}
{{%- for m in messages -%}}
{{{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}}}
{{%- if m.role == 'assistant' and loop.index0 > last.user and (loop.last or m.reasoning_content) -%}}
{{{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}}}
{{%- endif -%}}
{{{{- m.content -}}}}
{_CALLS}
{{{{- '<|im_end|>\\n' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n<think>\\n' -}}}}{{%- endif -%}}
"""

# A call is written by its id; its function's name stands in that.
KIMI_K2 = """\
{%- if tools -%}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}
{%- elif m.role == 'user' -%}{{- '<|im_user|>user<|im_middle|>' -}}
{%- else -%}{{- '<|im_system|>' + m.role + '<|im_middle|>' -}}
{%- endif -%}
{%- if m.role == 'tool' -%}{{- '## Return of ' + m.tool_call_id + '\\n' -}}{%- endif -%}
{{- m.content -}}
{%- if m.tool_calls -%}
{{- '<|tool_calls_section_begin|>' -}}
{%- for c in m.tool_calls -%}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' -}}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson -}}
{{- '<|tool_call_end|>' -}}
{%- endfor -%}
{{- '<|tool_calls_section_end|>' -}}
{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}{%- endif -%}
"""

# The header opens the reasoning; a reply without any has no mark of it.
MINIMAX_M2 = """\
{%- set last = namespace(user=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set last.user = messages.index(m) -%}{%- endfor -%}
{{- ']~!b[]~b]system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- else -%}{{- 'You help.' -}}{%- endif -%}
{%- if tools -%}{{- '\\n<tools>' + (tools | tojson) + '</tools>' -}}{%- endif -%}
{{- '[e~[\\n' -}}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'assistant' -%}
{{- ']~b]ai\\n' -}}
{%- if m.reasoning_content and messages.index(m) > last.user -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content -}}
{%- if m.tool_calls -%}
{{- '\\n<minimax:tool_call>\\n' -}}
{%- for c in m.tool_calls -%}
{{- '<invoke name="' + c.function.name + '">\\n' -}}
{%- for key, value in c.function.arguments.items() -%}
{{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) + '</parameter>\\n' -}}
{%- endfor -%}
{{- '</invoke>\\n' -}}
{%- endfor -%}
{{- '</minimax:tool_call>' -}}
{%- endif -%}
{%- else -%}{{- ']~b]' + m.role + '\\n' + m.content -}}{%- endif -%}
{{- '[e~[\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\\n<think>\\n' -}}{%- endif -%}
"""

GRANITE_3 = """\
{%- if tools -%}{{- '<|start_of_role|>tools<|end_of_role|>' + (tools | tojson) + '<|end_of_text|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' + m.content -}}
{%- if m.tool_calls -%}{{- '<|tool_call|>' + (m.tool_calls | map(attribute='function') | list | tojson) -}}{%- endif -%}
{{- '<|end_of_text|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_of_role|>assistant<|end_of_role|>' -}}{%- endif -%}
"""

OLMO_2 = """\
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|' + m.role + '|>\\n' + m.content -}}
{{- (eos_token if m.role == 'assistant' else '') + ('' if m.role == 'assistant' and loop.last else '\\n') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

# Reasoning is part of the text; where it is off, an empty one opens every reply.
SMOLLM_3 = f"""\
{_TOOLS}
{{%- for m in messages -%}}
{{{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}}}
{{%- if m.role == 'assistant' and enable_thinking is defined and not enable_thinking -%}}
{{{{- '<think>\\n\\n</think>\\n' -}}}}
{{%- endif -%}}
{{{{- m.content -}}}}
{_CALLS}
{{{{- '<|im_end|>\\n' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
{{{{- '<|im_start|>assistant\\n' -}}}}
{{%- if enable_thinking is defined and not enable_thinking -%}}{{{{- '<think>\\n\\n</think>\\n' -}}}}{{%- endif -%}}
{{%- endif -%}}
"""

# The header opens or closes the reasoning; turns show none. Arguments are text.
DEEPSEEK_V3_1 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'tool' -%}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
{%- else -%}
{%- if messages[loop.index0 - 1].role == 'user' -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}
{{- m.content.split('</think>')[-1] -}}
{%- if m.tool_calls -%}
{{- '<｜tool▁calls▁begin｜>' -}}
{%- for c in m.tool_calls -%}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' -}}
{%- endfor -%}
{{- '<｜tool▁calls▁end｜>' -}}
{%- endif -%}
{{- eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role == 'user' -%}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') -}}
{%- endif -%}
"""

# gpt-oss: channels; reasoning of the newest reply alone; another end token in later prompts.
HARMONY = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}
{%- elif m.tool_calls -%}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' -}}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
{%- else -%}
{%- if m.thinking and loop.last -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

# Phi-3: the end of the text behind whatever is the last turn.
PHI_3 = """\
{%- for m in messages -%}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' -}}{%- endfor -%}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}
"""

# Calls only of messages without content.
CALLS_OF_NULL = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.tool_calls and m.content is none -%}{{- m.tool_calls | tojson -}}{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
