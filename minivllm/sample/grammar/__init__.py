"""Structured output: an answer that matches a pattern, a JSON schema or a list of choices, whatever the model prefers.

    what is asked for --parse--> tree --build--> automaton over bytes --with the vocabulary--> one bit for each token

The leading engine (vLLM 0.32, `v1/structured_output/`) hands this to a library, by default xgrammar, whose automaton has
a stack: it takes any context-free grammar, recursive schemas and JSON of any depth, and checks ahead of time which tokens
need no look at the stack. An automaton without a stack is enough for patterns and for schemas that don't recurse, and
can be read in an hour; nesting is bounded instead ("any JSON" to a depth of `schema.ANY_DEPTH`).

Left out, here as there: jump-forward decoding, which appends text that the grammar forces without asking the model. It
would have to tokenise the text anew as the model would have, or the model goes on from tokens that it never learnt.
"""
