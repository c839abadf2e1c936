"""GLIDE drafts on SGLang: a plugin that adds the speculative algorithm GLIDE to an unmodified SGLang.

SGLang finds `register` by the entry point group `sglang.srt.plugins`. The rest of the package imports SGLang, or is
imported by those modules; `longspec` itself never imports it.

| module | content |
|---|---|
| `algorithm` | registration, and what SGLang asks of an algorithm |
| `checks` | one-line refusals at the start, and the draft's weights |
| `worker` | a round: draft, SGLang's own tree verification, the draft's keys of the accepted tokens |
| `greedy_round` | the whole of a greedy round on tensors alone |
| `drafter` | one pass over the tree's levels, on tensors alone, and the draft's own keys by KV slot |
| `draft_model` | the layer with the target's embedding, head and rotary table |
| `paged` | our attention kernel in SGLang's verification |
| `large_batches` | the tree of each batch size |
| `graphs` | CUDA graphs by batch size |
"""


def register() -> None:
    """Entry point: register GLIDE with SGLang. Runs in each of its processes."""
    from longspec.sglang.algorithm import register_glide

    register_glide()
